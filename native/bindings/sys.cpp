#include <pybind11/stl.h>

#include <map>

#include "bindings.hpp"
#include "bootseer/error.hpp"
#include "bootseer/mounts.hpp"
#include "bootseer/namespaces.hpp"

namespace py = pybind11;

namespace bootseer {
namespace {

std::string mount_image(const OsString& image_path, const OsString& target, const std::string& by) {
  static const std::map<std::string, ErofsMount> kWays{
      {"any", ErofsMount::any}, {"file", ErofsMount::file}, {"loop", ErofsMount::loop}};
  const auto way = kWays.find(by);
  if (way == kWays.end()) throw Error(Errc::usage, "an image is mounted by any, file or loop, not by " + by);
  return mount_erofs(image_path.bytes, target.bytes, way->second);
}

std::vector<std::string> unwrap(std::vector<OsString> strings) {
  std::vector<std::string> result;
  for (OsString& text : strings) result.push_back(std::move(text.bytes));
  return result;
}

void overlay(std::vector<OsString> lower, const OsString& upper, const OsString& work,
             const OsString& target) {
  mount_overlay(unwrap(std::move(lower)), upper.bytes, work.bytes, target.bytes);
}

void bind(const OsString& source, const OsString& target, bool recursive, bool read_only) {
  mount_bind(source.bytes, target.bytes, recursive, read_only);
}

int spawn(const OsString& root, std::vector<OsString> argv, const std::map<OsString, OsString>& env,
          const OsString& cwd, const std::vector<std::tuple<OsString, OsString, bool>>& binds,
          const OsString& hostname, uid_t uid, gid_t gid, std::vector<gid_t> groups) {
  SpawnOptions options;
  options.root = root.bytes;
  options.argv = unwrap(std::move(argv));
  for (const auto& [name, value] : env) options.env.push_back(name.bytes + "=" + value.bytes);
  options.cwd = cwd.bytes;
  for (const auto& [source, target, read_only] : binds) {
    options.binds.push_back({source.bytes, target.bytes, read_only});
  }
  options.hostname = hostname.bytes;
  options.uid = uid;
  options.gid = gid;
  options.groups = std::move(groups);
  const py::gil_scoped_release release;
  return spawn_namespaced(options);
}

}  // namespace

void register_sys(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  module.def("mount_erofs", &mount_image, py::arg("image_path"), py::arg("target"), py::kw_only(),
             py::arg("by") = "any", Release(), "Mount an EROFS image file read-only; returns how.");
  module.def("mount_overlay", &overlay, py::arg("lower"), py::arg("upper"), py::arg("work"),
             py::arg("target"), Release(), "Mount an overlay.");
  module.def("mount_bind", &bind, py::arg("source"), py::arg("target"), py::kw_only(),
             py::arg("recursive") = true, py::arg("read_only") = false, Release(), "Bind-mount.");
  module.def(
      "umount", [](const OsString& target, bool lazy) { unmount(target.bytes, lazy); }, py::arg("target"),
      py::kw_only(), py::arg("lazy") = false, Release(), "Unmount.");
  module.def("spawn_namespaced", &spawn, py::arg("root"), py::arg("argv"), py::arg("env"), py::arg("cwd"),
             py::kw_only(), py::arg("binds") = std::vector<std::tuple<OsString, OsString, bool>>{},
             py::arg("hostname") = OsString{}, py::arg("uid") = 0, py::arg("gid") = 0,
             py::arg("groups") = std::vector<gid_t>{},
             "Start a command in a root of its own; returns the pid of the namespace's init.");
}

}  // namespace bootseer
