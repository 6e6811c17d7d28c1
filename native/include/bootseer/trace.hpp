// First-use records of a start: which bytes were read, when, by whom. docs/formats/trace.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bootseer/chunk_map.hpp"

namespace bootseer {

inline constexpr std::uint32_t kTraceBlockBytes = 64 * 1024;
inline constexpr std::size_t kMaxTraceRecords = 1U << 20;
inline constexpr std::uint32_t kMaxTraceRecordBytes = 1U << 20;

struct TraceRecord {
  static constexpr std::uint32_t kReady = 1;  // not a read: the workload said that it is ready

  std::uint64_t offset = 0;
  std::uint32_t length = 0;
  std::uint32_t pid = 0;
  std::uint64_t t_ns = 0;  // since the start of the recording
  std::uint32_t flags = 0;

  friend bool operator==(const TraceRecord&, const TraceRecord&) = default;
};

// A chunk and the time of its first use.
struct PlanEntry {
  std::uint32_t chunk = 0;
  std::uint64_t t_ns = 0;

  friend bool operator==(const PlanEntry&, const PlanEntry&) = default;
};

class Trace {
 public:
  Trace() = default;
  Trace(std::uint64_t image_bytes, std::uint64_t started_unix_ns, std::vector<TraceRecord> records);

  // Records after the first damaged one are dropped. Throws Error(integrity) when there is no valid header.
  static Trace parse(std::span<const std::byte> bytes);
  static Trace load(const std::string& path);
  std::vector<std::byte> serialize() const;

  // The union, by time. Ranges that occur in several traces keep their earliest time.
  static Trace merge(std::span<const Trace> traces);

  std::uint64_t image_bytes() const noexcept { return image_bytes_; }
  std::uint64_t started_unix_ns() const noexcept { return started_unix_ns_; }
  const std::vector<TraceRecord>& records() const noexcept { return records_; }
  std::uint64_t dropped() const noexcept { return dropped_; }  // records lost to damage or to the limit
  bool is_finished() const noexcept;                           // the workload said that it is ready

  // First use of each chunk that has to be fetched, earliest first. What lies outside `map` is ignored.
  std::vector<PlanEntry> plan(const ChunkMap& map) const;

 private:
  std::uint64_t image_bytes_ = 0;
  std::uint64_t started_unix_ns_ = 0;
  std::vector<TraceRecord> records_;
  std::uint64_t dropped_ = 0;
};

namespace trace_format {
inline constexpr std::size_t kHeaderBytes = 64;
inline constexpr std::size_t kRecordBytes = 32;
void write_header(std::span<std::byte, kHeaderBytes> out, std::uint64_t image_bytes,
                  std::uint64_t started_unix_ns);
void write_record(std::span<std::byte, kRecordBytes> out, const TraceRecord& record);
}  // namespace trace_format

}  // namespace bootseer
