#include "bindings.hpp"

namespace bootseer {

void register_data(pybind11::module_&) {}

}  // namespace bootseer
