#include <pybind11/stl.h>

#include <map>

#include "bindings.hpp"
#include "bootseer/error.hpp"
#include "bootseer/mounts.hpp"
#include "bootseer/namespaces.hpp"

namespace py = pybind11;

namespace bootseer {
namespace {

std::string mount_image(const std::string& image_path, const std::string& target, const std::string& by) {
  static const std::map<std::string, ErofsMount> kWays{
      {"any", ErofsMount::any}, {"file", ErofsMount::file}, {"loop", ErofsMount::loop}};
  const auto way = kWays.find(by);
  if (way == kWays.end()) throw Error(Errc::usage, "an image is mounted by any, file or loop, not by " + by);
  return mount_erofs(image_path, target, way->second);
}

int spawn(const std::string& root, std::vector<std::string> argv,
          const std::map<std::string, std::string>& env, const std::string& cwd,
          const std::vector<std::tuple<std::string, std::string, bool>>& binds, const std::string& hostname,
          uid_t uid, gid_t gid) {
  SpawnOptions options;
  options.root = root;
  options.argv = std::move(argv);
  for (const auto& [name, value] : env) options.env.push_back(name + "=" + value);
  options.cwd = cwd;
  for (const auto& [source, target, read_only] : binds) options.binds.push_back({source, target, read_only});
  options.hostname = hostname;
  options.uid = uid;
  options.gid = gid;
  const py::gil_scoped_release release;
  return spawn_namespaced(options);
}

}  // namespace

void register_sys(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  module.def("mount_erofs", &mount_image, py::arg("image_path"), py::arg("target"), py::kw_only(),
             py::arg("by") = "any", Release(), "Mount an EROFS image file read-only; returns how.");
  module.def("mount_overlay", &mount_overlay, py::arg("lower"), py::arg("upper"), py::arg("work"),
             py::arg("target"), Release(), "Mount an overlay.");
  module.def("mount_bind", &mount_bind, py::arg("source"), py::arg("target"), py::kw_only(),
             py::arg("recursive") = true, py::arg("read_only") = false, Release(), "Bind-mount.");
  module.def("umount", &unmount, py::arg("target"), py::kw_only(), py::arg("lazy") = false, Release(),
             "Unmount.");
  module.def("spawn_namespaced", &spawn, py::arg("root"), py::arg("argv"), py::arg("env"), py::arg("cwd"),
             py::kw_only(), py::arg("binds") = std::vector<std::tuple<std::string, std::string, bool>>{},
             py::arg("hostname") = "", py::arg("uid") = 0, py::arg("gid") = 0,
             "Start a command in a root of its own; returns the pid of the namespace's init.");
}

}  // namespace bootseer
