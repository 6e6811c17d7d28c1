#include <fcntl.h>
#include <pybind11/stl.h>

#include <bootseer/error.hpp>
#include <bootseer/local_file.hpp>
#include <bootseer/session.hpp>
#include <bootseer/testing/read_loop.hpp>
#include <bootseer/testing/slow_file.hpp>

#include "bindings.hpp"

namespace py = pybind11;

namespace bootseer {
namespace {

JournalMode journal_mode(const std::string& name) {
  if (name == "auto") return JournalMode::automatic;
  if (name == "always") return JournalMode::always;
  if (name == "never") return JournalMode::never;
  throw Error(Errc::usage, "journal must be auto, always or never, not " + name);
}

// The keyword arguments that mount() and resume() share; resume() ignores what only mount(2) can set.
SessionOptions options_from(const std::string& mountpoint, const py::kwargs& arguments) {
  SessionOptions options;
  options.mountpoint = mountpoint;
  for (const auto& [key, value] : arguments) {
    const auto name = key.cast<std::string>();
    if (name == "state_dir") {
      options.state_dir = value.is_none() ? "" : value.cast<std::string>();
    } else if (name == "threads") {
      options.threads = value.cast<unsigned>();
    } else if (name == "max_read_bytes") {
      options.max_read_bytes = value.cast<std::uint32_t>();
    } else if (name == "max_background") {
      options.max_background = value.cast<std::uint16_t>();
    } else if (name == "read_ahead_bytes") {
      options.read_ahead_bytes = value.cast<std::uint32_t>();
    } else if (name == "passthrough") {
      options.passthrough = value.cast<bool>();
    } else if (name == "allow_other") {
      options.allow_other = value.cast<bool>();
    } else if (name == "read_only") {
      options.read_only = value.cast<bool>();
    } else if (name == "fsname") {
      options.fsname = value.cast<std::string>();
    } else if (name == "subtype") {
      options.subtype = value.cast<std::string>();
    } else if (name == "journal") {
      options.journal = journal_mode(value.cast<std::string>());
    } else {
      throw py::type_error("unexpected keyword argument '" + name + "'");
    }
  }
  return options;
}

std::unique_ptr<Session> mount(const SessionOptions& options) {
  const py::gil_scoped_release release;
  return Session::mount(options);
}

std::unique_ptr<Session> resume(int device_fd, const SessionOptions& options) {
  UniqueFd device(::fcntl(device_fd, F_DUPFD_CLOEXEC, 3));
  if (!device) throw_errno("cannot duplicate the device descriptor");
  const py::gil_scoped_release release;
  return Session::resume(std::move(device), options);
}

py::dict info(const Session& session) {
  const auto info = session.info();
  py::dict values = py::cast(info.values);
  values["fallbacks"] = info.fallbacks;
  return values;
}

}  // namespace

void register_session(py::module_& module) {
  py::class_<LocalFile, ReadFile, std::shared_ptr<LocalFile>>(module, "LocalFile",
                                                              "A complete local regular file.")
      .def(py::init<const std::string&, bool>(), py::arg("path"), py::kw_only(),
           py::arg("passthrough") = false);

  py::class_<testing::SlowFile, ReadFile, std::shared_ptr<testing::SlowFile>>(
      module, "_SlowFile", "For tests: the bytes of another file, each read late.")
      .def(py::init([](std::shared_ptr<ReadFile> inner, double delay_s) {
             const auto delay =
                 std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(delay_s));
             return std::make_shared<testing::SlowFile>(std::move(inner), delay);
           }),
           py::arg("inner"), py::arg("delay_s"));
  module.def(
      "_read_loop",
      [](const std::string& path, bool direct, bool random, std::size_t block_bytes, double duration_s,
         std::uint32_t seed) {
        testing::ReadLoopResult result;
        {
          const py::gil_scoped_release release;
          result = testing::read_loop(path, direct, random, block_bytes, duration_s, seed);
        }
        return py::make_tuple(result.reads, result.bytes, result.elapsed_s);
      },
      "For benches: read for a while, (reads, bytes, elapsed_s).", py::arg("path"), py::kw_only(),
      py::arg("direct"), py::arg("random"), py::arg("block_bytes"), py::arg("duration_s"), py::arg("seed"));

  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Session>(module, "Session", "Answers FUSE READs in C++; pyfuse3 gets everything else.")
      .def_static(
          "mount",
          [](const std::string& mountpoint, const py::kwargs& arguments) {
            return mount(options_from(mountpoint, arguments));
          },
          py::arg("mountpoint"))
      .def_static(
          "resume",
          [](int device_fd, const std::string& mountpoint, const py::kwargs& arguments) {
            return resume(device_fd, options_from(mountpoint, arguments));
          },
          py::arg("device_fd"), py::kw_only(), py::arg("mountpoint"))
      .def_property_readonly("control_fd", &Session::control_fd)
      .def_property_readonly("device_fd", &Session::device_fd)
      .def_property_readonly("ended_fd", &Session::ended_fd)
      .def_property_readonly("ended", &Session::ended)
      .def("add_file", &Session::add_file, py::arg("inode"), py::arg("read_file"))
      .def("remove_file", &Session::remove_file, py::arg("inode"), Release())
      .def("start", &Session::start, Release())
      .def("stop", &Session::stop, Release())
      .def("unmount", &Session::unmount, py::kw_only(), py::arg("lazy") = false, Release())
      .def("info", &info)
      .def("statistics", &Session::statistics);
}

}  // namespace bootseer
