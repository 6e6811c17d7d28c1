#include "bindings.hpp"

namespace bootseer {

void register_image(pybind11::module_&) {}

}  // namespace bootseer
