// One register_*() per area; module.cpp only calls them.
#pragma once

#include <pybind11/pybind11.h>

#include <compare>
#include <string>

namespace bootseer {

// What the operating system gave us or gets: a path, an argument, a variable. Python holds bytes that are not
// UTF-8 as lone surrogates, which a plain std::string refuses.
struct OsString {
  std::string bytes;
  auto operator<=>(const OsString&) const = default;
};

// A message that may hold such bytes.
inline pybind11::object os_text(const char* message) {
  return pybind11::reinterpret_steal<pybind11::object>(PyUnicode_DecodeFSDefault(message));
}

void register_session(pybind11::module_& module);  // bindings/session.cpp
void register_data(
    pybind11::module_& module);  // bindings/data.cpp: ChunkMap, Cache, Source, BlockFile, Trace
void register_image(pybind11::module_& module);  // bindings/image.cpp: tree building, EROFS writer, chunker
void register_sys(pybind11::module_& module);    // bindings/sys.cpp: mount(2), loop, namespaces
}  // namespace bootseer

template <>
struct pybind11::detail::type_caster<bootseer::OsString> {
  PYBIND11_TYPE_CASTER(bootseer::OsString, const_name("str"));

  bool load(handle source, bool) {
    PyObject* encoded = nullptr;
    if (PyUnicode_FSConverter(source.ptr(), &encoded) == 0) {
      PyErr_Clear();
      return false;
    }
    const auto owner = reinterpret_steal<object>(encoded);
    value.bytes.assign(PyBytes_AS_STRING(encoded), static_cast<std::size_t>(PyBytes_GET_SIZE(encoded)));
    return true;
  }

  static handle cast(const bootseer::OsString& text, return_value_policy, handle) {
    return bootseer::os_text(text.bytes.c_str()).release();
  }
};
