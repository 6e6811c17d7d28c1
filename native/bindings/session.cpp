#include <fcntl.h>
#include <pybind11/stl.h>

#include <bootseer/error.hpp>
#include <bootseer/local_file.hpp>
#include <bootseer/session.hpp>
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

SessionOptions make_options(std::string mountpoint, std::optional<std::string> state_dir, unsigned threads,
                            std::uint32_t max_read_bytes, std::uint16_t max_background,
                            std::uint32_t read_ahead_bytes, bool passthrough, bool allow_other,
                            bool read_only, std::string fsname, std::string subtype,
                            const std::string& journal) {
  SessionOptions options;
  options.mountpoint = std::move(mountpoint);
  options.state_dir = state_dir.value_or("");
  options.threads = threads;
  options.max_read_bytes = max_read_bytes;
  options.max_background = max_background;
  options.read_ahead_bytes = read_ahead_bytes;
  options.passthrough = passthrough;
  options.allow_other = allow_other;
  options.read_only = read_only;
  options.fsname = std::move(fsname);
  options.subtype = std::move(subtype);
  options.journal = journal_mode(journal);
  return options;
}

std::unique_ptr<Session> mount(std::string mountpoint, std::optional<std::string> state_dir, unsigned threads,
                               std::uint32_t max_read_bytes, std::uint16_t max_background,
                               std::uint32_t read_ahead_bytes, bool passthrough, bool allow_other,
                               bool read_only, std::string fsname, std::string subtype,
                               const std::string& journal) {
  auto options = make_options(std::move(mountpoint), std::move(state_dir), threads, max_read_bytes,
                              max_background, read_ahead_bytes, passthrough, allow_other, read_only,
                              std::move(fsname), std::move(subtype), journal);
  const py::gil_scoped_release release;
  return Session::mount(std::move(options));
}

std::unique_ptr<Session> resume(int device_fd, std::string mountpoint, std::string state_dir,
                                unsigned threads, std::uint32_t max_read_bytes, std::uint16_t max_background,
                                std::uint32_t read_ahead_bytes, const std::string& journal) {
  auto options =
      make_options(std::move(mountpoint), std::move(state_dir), threads, max_read_bytes, max_background,
                   read_ahead_bytes, true, true, true, "bootseer", "bootseer", journal);
  UniqueFd device(::fcntl(device_fd, F_DUPFD_CLOEXEC, 3));
  if (!device) throw_errno("cannot duplicate the device descriptor");
  const py::gil_scoped_release release;
  return Session::resume(std::move(device), std::move(options));
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

  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Session>(module, "Session", "Answers FUSE READs in C++; pyfuse3 gets everything else.")
      .def_static("mount", &mount, py::arg("mountpoint"), py::kw_only(), py::arg("state_dir") = py::none(),
                  py::arg("threads") = 4, py::arg("max_read_bytes") = 1U << 20,
                  py::arg("max_background") = 64, py::arg("read_ahead_bytes") = 1U << 20,
                  py::arg("passthrough") = true, py::arg("allow_other") = true, py::arg("read_only") = true,
                  py::arg("fsname") = "bootseer", py::arg("subtype") = "bootseer",
                  py::arg("journal") = "auto")
      .def_static("resume", &resume, py::arg("device_fd"), py::kw_only(), py::arg("mountpoint"),
                  py::arg("state_dir"), py::arg("threads") = 4, py::arg("max_read_bytes") = 1U << 20,
                  py::arg("max_background") = 64, py::arg("read_ahead_bytes") = 1U << 20,
                  py::arg("journal") = "auto")
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
