#include "bindings.hpp"

namespace bootseer {

void register_session(pybind11::module_&) {}

}  // namespace bootseer
