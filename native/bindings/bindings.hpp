// One register_*() per area; module.cpp only calls them.
#pragma once

#include <pybind11/pybind11.h>

namespace bootseer {
void register_session(pybind11::module_& module);  // bindings/session.cpp
void register_data(
    pybind11::module_& module);  // bindings/data.cpp: ChunkMap, Cache, Source, BlockFile, Trace
void register_image(pybind11::module_& module);  // bindings/image.cpp: tree building, EROFS writer, chunker
void register_sys(pybind11::module_& module);    // bindings/sys.cpp: mount(2), loop, namespaces
}  // namespace bootseer
