#include <pybind11/stl.h>

#include "bindings.hpp"
#include "bootseer/chunker.hpp"
#include "bootseer/erofs_writer.hpp"

namespace py = pybind11;

namespace bootseer {
namespace {

// Runs on the calling thread, which gave the GIL away. Lets Ctrl-C through, with or without a callback.
ProgressCallback progress_of(const py::object& callback, const char* stage) {
  return [&callback, stage](std::uint64_t done_bytes, std::uint64_t total_bytes) {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (!callback.is_none()) callback(stage, done_bytes, total_bytes);
  };
}

py::dict build_image(std::vector<OsString> layers, const OsString& directory, const OsString& output_path,
                     const OsString& spool_dir, const py::object& progress) {
  std::vector<std::string> paths;
  for (OsString& layer : layers) paths.push_back(std::move(layer.bytes));
  ErofsImage image;
  {
    const ProgressCallback reading = progress_of(progress, "reading layers");
    const ProgressCallback building = progress_of(progress, "building");
    const py::gil_scoped_release release;
    Tree tree = directory.bytes.empty() ? Tree::from_layers(paths, spool_dir.bytes, reading)
                                        : Tree::from_directory(directory.bytes);
    image = write_erofs(tree, output_path.bytes, building);
  }
  py::dict result;
  result["image_bytes"] = image.image_bytes;
  result["meta_bytes"] = image.meta_bytes;
  result["files"] = image.files;
  result["extents"] = image.extents;
  return result;
}

ChunkMap chunk(const OsString& image_path, const OsString& blob_path, std::uint64_t meta_bytes,
               const std::vector<std::uint64_t>& extents, std::uint32_t average_bytes, int level,
               unsigned threads, const py::object& progress) {
  const ProgressCallback report = progress_of(progress, "compressing");
  const py::gil_scoped_release release;
  return chunk_image(image_path.bytes, blob_path.bytes, meta_bytes, extents, {average_bytes, level, threads},
                     report);
}

}  // namespace

void register_image(py::module_& module) {
  module.def("build_image", &build_image, py::kw_only(), py::arg("layers") = std::vector<OsString>{},
             py::arg("directory") = OsString{}, py::arg("output_path"), py::arg("spool_dir"),
             py::arg("progress") = py::none(),
             "Write an EROFS image from a root directory or from layer tars in order.");
  module.def("chunk_image", &chunk, py::arg("image_path"), py::arg("blob_path"), py::kw_only(),
             py::arg("meta_bytes"), py::arg("extents"), py::arg("average_bytes"), py::arg("level"),
             py::arg("threads"), py::arg("progress") = py::none(),
             "Cut an image into chunks, write the blob, return the map.");
}

}  // namespace bootseer
