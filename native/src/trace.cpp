#include "bootseer/trace.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>

#include "bootseer/bytes.hpp"
#include "bootseer/crc32c.hpp"
#include "bootseer/error.hpp"
#include "bootseer/read_whole_file.hpp"

namespace bootseer {
namespace trace_format {
namespace {

constexpr char kMagic[] = "BSRTRCE1";
constexpr std::uint32_t kVersion = 1;

}  // namespace

void write_header(std::span<std::byte, kHeaderBytes> out, std::uint64_t image_bytes,
                  std::uint64_t started_unix_ns) {
  std::fill(out.begin(), out.end(), std::byte{0});
  std::memcpy(out.data(), kMagic, 8);
  store_le(out.data() + 8, kVersion);
  store_le(out.data() + 12, static_cast<std::uint32_t>(kHeaderBytes));
  store_le(out.data() + 16, static_cast<std::uint32_t>(kRecordBytes));
  store_le(out.data() + 24, started_unix_ns);
  store_le(out.data() + 32, image_bytes);
  store_le(out.data() + 60, crc32c(out.first(60)));
}

void write_record(std::span<std::byte, kRecordBytes> out, const TraceRecord& record) {
  store_le(out.data(), record.offset);
  store_le(out.data() + 8, record.length);
  store_le(out.data() + 12, record.pid);
  store_le(out.data() + 16, record.t_ns);
  store_le(out.data() + 24, record.flags);
  store_le(out.data() + 28, crc32c(out.first(28)));
}

}  // namespace trace_format

namespace {

using trace_format::kHeaderBytes;
using trace_format::kRecordBytes;

[[noreturn]] void reject(const std::string& why) {
  throw Error(Errc::integrity, "trace: " + why);
}

}  // namespace

Trace::Trace(std::uint64_t image_bytes, std::uint64_t started_unix_ns, std::vector<TraceRecord> records)
    : image_bytes_(image_bytes), started_unix_ns_(started_unix_ns), records_(std::move(records)) {
  if (records_.size() > kMaxTraceRecords) {
    dropped_ = records_.size() - kMaxTraceRecords;
    records_.resize(kMaxTraceRecords);
  }
}

Trace Trace::parse(std::span<const std::byte> bytes) {
  if (bytes.size() < kHeaderBytes) reject("shorter than its header");
  const std::byte* header = bytes.data();
  if (std::memcmp(header, trace_format::kMagic, 8) != 0) reject("wrong magic");
  if (load_le<std::uint32_t>(header + 60) != crc32c(bytes.first(60))) reject("header checksum mismatch");
  if (load_le<std::uint32_t>(header + 8) != trace_format::kVersion) reject("unknown version");
  if (load_le<std::uint32_t>(header + 12) != kHeaderBytes ||
      load_le<std::uint32_t>(header + 16) != kRecordBytes) {
    reject("wrong header or record length");
  }
  Trace trace;
  trace.started_unix_ns_ = load_le<std::uint64_t>(header + 24);
  trace.image_bytes_ = load_le<std::uint64_t>(header + 32);
  auto left = bytes.subspan(kHeaderBytes);
  trace.records_.reserve(std::min(left.size() / kRecordBytes, kMaxTraceRecords));
  while (left.size() >= kRecordBytes && trace.records_.size() < kMaxTraceRecords) {
    const std::byte* at = left.data();
    if (load_le<std::uint32_t>(at + 28) != crc32c(left.first(28))) break;
    trace.records_.push_back({.offset = load_le<std::uint64_t>(at),
                              .length = load_le<std::uint32_t>(at + 8),
                              .pid = load_le<std::uint32_t>(at + 12),
                              .t_ns = load_le<std::uint64_t>(at + 16),
                              .flags = load_le<std::uint32_t>(at + 24)});
    left = left.subspan(kRecordBytes);
  }
  trace.dropped_ = (left.size() + kRecordBytes - 1) / kRecordBytes;
  return trace;
}

Trace Trace::load(const std::string& path) {
  // One record more than allowed, so that an oversized file shows up as dropped records.
  return parse(read_whole_file(path, kHeaderBytes + (kMaxTraceRecords + 1) * kRecordBytes));
}

std::vector<std::byte> Trace::serialize() const {
  std::vector<std::byte> bytes(kHeaderBytes + records_.size() * kRecordBytes);
  trace_format::write_header(std::span(bytes).first<kHeaderBytes>(), image_bytes_, started_unix_ns_);
  std::size_t at = kHeaderBytes;
  for (const TraceRecord& record : records_) {
    trace_format::write_record(std::span(bytes).subspan(at).first<kRecordBytes>(), record);
    at += kRecordBytes;
  }
  return bytes;
}

Trace Trace::merge(std::span<const Trace> traces) {
  std::vector<TraceRecord> all;
  std::uint64_t image_bytes = 0;
  std::uint64_t started = traces.empty() ? 0 : std::numeric_limits<std::uint64_t>::max();
  for (const Trace& trace : traces) {
    all.insert(all.end(), trace.records_.begin(), trace.records_.end());
    image_bytes = std::max(image_bytes, trace.image_bytes_);
    started = std::min(started, trace.started_unix_ns_);
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const TraceRecord& a, const TraceRecord& b) { return a.t_ns < b.t_ns; });
  std::set<std::pair<std::uint64_t, std::uint32_t>> seen;
  std::erase_if(all, [&seen](const TraceRecord& record) {
    return (record.flags & TraceRecord::kReady) != 0 || !seen.emplace(record.offset, record.length).second;
  });
  return Trace(image_bytes, started, std::move(all));
}

bool Trace::is_finished() const noexcept {
  return std::any_of(records_.begin(), records_.end(),
                     [](const TraceRecord& record) { return (record.flags & TraceRecord::kReady) != 0; });
}

std::vector<PlanEntry> Trace::plan(const ChunkMap& map) const {
  constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();
  std::vector<std::uint64_t> first_use(map.count(), kNever);
  std::vector<PlanEntry> entries;
  // By time first, so that chunks of equal time keep the order of the reads.
  std::vector<const TraceRecord*> by_time;
  by_time.reserve(records_.size());
  for (const TraceRecord& record : records_) {
    const bool is_read = (record.flags & TraceRecord::kReady) == 0;
    const bool is_inside =
        record.length > 0 && record.length <= kMaxTraceRecordBytes && record.offset < map.image_bytes();
    if (is_read && is_inside) by_time.push_back(&record);
  }
  std::stable_sort(by_time.begin(), by_time.end(),
                   [](const TraceRecord* a, const TraceRecord* b) { return a->t_ns < b->t_ns; });
  for (const TraceRecord* record : by_time) {
    const std::uint64_t end =
        record->offset + std::min<std::uint64_t>(record->length, map.image_bytes() - record->offset);
    for (std::uint32_t i = map.index_of(record->offset); i < map.count() && map.chunk(i).raw_offset < end;
         ++i) {
      if (map.chunk(i).is_zeros() || first_use[i] != kNever) continue;
      first_use[i] = std::min(record->t_ns, kNever - 1);
      entries.push_back({i, first_use[i]});
    }
  }
  return entries;
}

}  // namespace bootseer
