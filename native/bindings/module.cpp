#include <bootseer/error.hpp>
#include <bootseer/read_file.hpp>
#include <memory>
#include <system_error>

#include "bindings.hpp"

namespace py = pybind11;

namespace bootseer {
namespace {

const char* python_class(Errc code) {
  switch (code) {
    case Errc::usage:
      return "UsageError";
    case Errc::not_found:
      return "NotFoundError";
    case Errc::integrity:
      return "IntegrityError";
    case Errc::backend:
      return "BackendUnavailableError";
    case Errc::timeout:
      return "TimeoutExpiredError";
    case Errc::internal:
      break;
  }
  return "InternalError";
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const Error& error) {
    py::object type = py::module_::import("bootseer.core.errors").attr(python_class(error.code()));
    PyErr_SetObject(type.ptr(), type(os_text(error.what())).ptr());
  } catch (const std::system_error& error) {
    // OSError(errno, message) picks the right subclass (FileNotFoundError, PermissionError, …) by itself.
    py::object args = py::make_tuple(error.code().value(), os_text(error.what()));
    PyErr_SetObject(PyExc_OSError, args.ptr());
  }
}

}  // namespace
}  // namespace bootseer

PYBIND11_MODULE(_core, module) {
  module.doc() = "bootseer's data plane (C++). See bootseer.native for the public names.";
  py::register_exception_translator(&bootseer::translate);
  py::class_<bootseer::ReadFile, std::shared_ptr<bootseer::ReadFile>>(
      module, "ReadFile", "A read-only file that a Session can serve. Abstract.")
      .def_property_readonly("size_bytes", &bootseer::ReadFile::size);
  bootseer::register_data(module);
  bootseer::register_session(module);
  bootseer::register_image(module);
  bootseer::register_sys(module);
}
