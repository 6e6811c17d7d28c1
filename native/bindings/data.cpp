#include <pybind11/stl.h>

#include <bootseer/block_file.hpp>
#include <bootseer/cache.hpp>
#include <bootseer/chunk_map.hpp>
#include <bootseer/error.hpp>
#include <bootseer/source.hpp>
#include <bootseer/trace.hpp>
#include <cstring>

#include "bindings.hpp"

namespace py = pybind11;

namespace bootseer {
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

py::bytes to_bytes(std::span<const std::byte> bytes) {
  return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

py::bytes to_bytes(const Digest& digest) {
  return to_bytes(std::as_bytes(std::span(digest)));
}

std::span<const std::byte> as_span(const py::buffer_info& info) {
  return {static_cast<const std::byte*>(info.ptr), static_cast<std::size_t>(info.size * info.itemsize)};
}

Digest to_digest(const py::bytes& bytes) {
  const std::string_view view = bytes;
  Digest digest;
  if (view.size() != digest.size()) throw Error(Errc::usage, "a sha256 digest has 32 bytes");
  std::memcpy(digest.data(), view.data(), digest.size());
  return digest;
}

template <typename T>
T parse(const py::buffer& data) {
  const py::buffer_info info = data.request();
  const py::gil_scoped_release release;
  return T::parse(as_span(info));
}

template <typename T>
py::bytes serialize(const T& object) {
  std::vector<std::byte> bytes;
  {
    const py::gil_scoped_release release;
    bytes = object.serialize();
  }
  return to_bytes(bytes);
}

using Entry = std::tuple<std::uint64_t, std::uint32_t, std::uint64_t, std::uint32_t, py::bytes>;

ChunkMap make_map(std::uint64_t image_bytes, std::uint64_t meta_bytes, std::uint64_t blob_bytes,
                  const py::bytes& blob_sha256, const std::vector<Entry>& entries) {
  std::vector<Chunk> chunks;
  chunks.reserve(entries.size());
  for (const auto& [raw_offset, raw_bytes, blob_offset, stored_bytes, digest] : entries) {
    chunks.push_back({raw_offset, blob_offset, raw_bytes, stored_bytes, to_digest(digest)});
  }
  return ChunkMap(image_bytes, meta_bytes, blob_bytes, to_digest(blob_sha256), std::move(chunks));
}

Entry entry_of(const ChunkMap& map, std::uint32_t index) {
  if (index >= map.count()) throw py::index_error();
  const Chunk& chunk = map.chunk(index);
  return {chunk.raw_offset, chunk.raw_bytes, chunk.blob_offset, chunk.blob_bytes, to_bytes(chunk.sha256)};
}

using Plan = std::vector<std::pair<std::uint32_t, std::uint64_t>>;

Plan plan_of(const Trace& trace, const ChunkMap& map) {
  Plan plan;
  for (const PlanEntry& entry : trace.plan(map)) plan.emplace_back(entry.chunk, entry.t_ns);
  return plan;
}

py::dict statistics_of(const BlockFile& file) {
  Statistics statistics;
  {
    const py::gil_scoped_release release;
    statistics = file.statistics();
  }
  py::dict result;
  for (const auto& [name, value] : statistics.entries()) {
    result[py::str(name)] = std::visit([](const auto& v) -> py::object { return py::cast(v); }, value);
  }
  return result;
}

void register_chunk_map(py::module_& module) {
  py::class_<ChunkMap, std::shared_ptr<ChunkMap>>(module, "ChunkMap")
      .def(py::init(&make_map), py::arg("image_bytes"), py::arg("meta_bytes"), py::arg("blob_bytes"),
           py::arg("blob_sha256"), py::arg("entries"))
      .def_static("parse", &parse<ChunkMap>, py::arg("data"))
      .def_static("load", &ChunkMap::load, py::arg("path"), ReleaseGil())
      .def("serialize", &serialize<ChunkMap>)
      .def("chunk", &entry_of, py::arg("index"))
      .def(
          "index_of",
          [](const ChunkMap& map, std::uint64_t offset) {
            if (offset >= map.image_bytes()) throw py::index_error();
            return map.index_of(offset);
          },
          py::arg("raw_offset"))
      .def_property_readonly("image_bytes", &ChunkMap::image_bytes)
      .def_property_readonly("meta_bytes", &ChunkMap::meta_bytes)
      .def_property_readonly("blob_bytes", &ChunkMap::blob_bytes)
      .def_property_readonly("chunk_count", &ChunkMap::count)
      .def_property_readonly("blob_sha256", [](const ChunkMap& map) { return to_bytes(map.blob_sha256()); })
      .def_property_readonly("digest", [](const ChunkMap& map) { return to_bytes(map.digest()); });
}

void register_trace(py::module_& module) {
  py::class_<Trace>(module, "Trace")
      .def_static("parse", &parse<Trace>, py::arg("data"))
      .def_static("load", &Trace::load, py::arg("path"), ReleaseGil())
      .def_static(
          "merge", [](const std::vector<Trace>& traces) { return Trace::merge(traces); }, py::arg("traces"),
          ReleaseGil())
      .def("serialize", &serialize<Trace>)
      .def("records",
           [](const Trace& trace) {
             py::list records;
             for (const TraceRecord& record : trace.records()) {
               if ((record.flags & TraceRecord::kReady) != 0) continue;
               records.append(py::make_tuple(record.offset, record.length, record.pid, record.t_ns));
             }
             return records;
           })
      .def("plan", &plan_of, py::arg("map"), ReleaseGil())
      .def_property_readonly("dropped", &Trace::dropped)
      .def_property_readonly("image_bytes", &Trace::image_bytes)
      .def_property_readonly("started_unix_ns", &Trace::started_unix_ns)
      .def_property_readonly("is_finished", &Trace::is_finished);
}

void register_source(py::module_& module) {
  py::class_<Source, std::shared_ptr<Source>>(module, "Source")
      .def(
          "read",
          [](Source& source, std::uint64_t offset, std::uint64_t length) {
            std::vector<std::byte> bytes;
            {
              const py::gil_scoped_release release;
              bytes = source.read(offset, length);
            }
            return to_bytes(bytes);
          },
          py::arg("offset"), py::arg("length"))
      .def("__str__", &Source::describe);
  module.def(
      "open_source",
      [](const std::string& uri, std::optional<std::map<std::string, std::string>> headers,
         double connect_timeout_s, double request_timeout_s, unsigned retries, unsigned max_connections,
         const std::optional<std::string>& ca_file) {
        return open_source(uri, {.headers = headers.value_or(std::map<std::string, std::string>{}),
                                 .connect_timeout_s = connect_timeout_s,
                                 .request_timeout_s = request_timeout_s,
                                 .retries = retries,
                                 .ca_file = ca_file.value_or(""),
                                 .max_connections = max_connections});
      },
      py::arg("uri"), py::kw_only(), py::arg("headers") = py::none(), py::arg("connect_timeout_s") = 10.0,
      py::arg("request_timeout_s") = 60.0, py::arg("retries") = 5, py::arg("max_connections") = 8,
      py::arg("ca_file") = py::none(), ReleaseGil());
}

std::shared_ptr<BlockFile> make_block_file(Cache& cache, const std::string& key,
                                           std::shared_ptr<ChunkMap> map, std::shared_ptr<Source> source,
                                           const std::optional<std::string>& trace_path, double deadline_s,
                                           bool background_fill, bool record, double background_idle_s) {
  BlockFileOptions options;
  options.trace_path = trace_path.value_or("");
  options.record = record;
  options.fetcher.deadline = std::chrono::nanoseconds(static_cast<std::int64_t>(deadline_s * 1e9));
  options.fetcher.background_fill = background_fill;
  options.fetcher.idle_before_background =
      std::chrono::nanoseconds(static_cast<std::int64_t>(background_idle_s * 1e9));
  return std::make_shared<BlockFile>(cache, key, std::move(map), std::move(source), options);
}

void register_block_file(py::module_& module) {
  py::class_<Cache, std::shared_ptr<Cache>>(module, "Cache")
      .def(py::init<std::string, double>(), py::arg("directory"), py::kw_only(),
           py::arg("sync_interval_s") = 5.0, ReleaseGil())
      .def("usage_bytes", &Cache::usage_bytes, ReleaseGil())
      .def("close", &Cache::close, ReleaseGil())
      .def_property_readonly("directory", &Cache::directory);
  py::class_<BlockFile, ReadFile, std::shared_ptr<BlockFile>>(module, "BlockFile")
      .def(py::init(&make_block_file), py::arg("cache"), py::arg("key"), py::arg("map"), py::arg("source"),
           py::kw_only(), py::arg("trace_path") = py::none(), py::arg("deadline_s") = 30.0,
           py::arg("background_fill") = true, py::arg("record") = true, py::arg("background_idle_s") = 3.0,
           py::keep_alive<1, 2>(), ReleaseGil())
      .def(
          "prefetch",
          [](BlockFile& file, const Plan& plan) {
            std::vector<PlanEntry> entries;
            entries.reserve(plan.size());
            for (const auto& [chunk, t_ns] : plan) entries.push_back({chunk, t_ns});
            file.prefetch(entries);
          },
          py::arg("plan"), ReleaseGil())
      .def(
          "pread",
          [](BlockFile& file, std::uint64_t offset, std::size_t length) {
            std::vector<std::byte> bytes;
            {
              const py::gil_scoped_release release;
              bytes = file.pread(offset, length);
            }
            return to_bytes(bytes);
          },
          py::arg("offset"), py::arg("length"))
      .def("is_complete", &BlockFile::is_complete, ReleaseGil())
      .def("local_path", &BlockFile::local_path)
      .def("ready_bytes", &BlockFile::ready_bytes, ReleaseGil())
      .def("statistics", &statistics_of)
      .def("mark_ready", &BlockFile::mark_ready, ReleaseGil())
      .def("close", &BlockFile::close, ReleaseGil());
}

}  // namespace

void register_data(py::module_& module) {
  register_chunk_map(module);
  register_trace(module);
  register_source(module);
  register_block_file(module);
}

}  // namespace bootseer
