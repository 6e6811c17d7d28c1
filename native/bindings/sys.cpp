#include "bindings.hpp"

namespace bootseer {

void register_sys(pybind11::module_&) {}

}  // namespace bootseer
