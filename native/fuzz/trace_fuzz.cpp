// Any bytes are a trace (perhaps with a dropped tail) or an IntegrityError, and a plan never leaves the map.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "bootseer/bytes.hpp"
#include "bootseer/crc32c.hpp"
#include "bootseer/error.hpp"
#include "bootseer/trace.hpp"

namespace {

const bootseer::ChunkMap& small_map() {
  static const bootseer::ChunkMap map = [] {
    std::vector<bootseer::Chunk> chunks;
    for (std::uint32_t i = 0; i < 16; ++i) {
      bootseer::Digest digest{};
      digest[0] = static_cast<std::uint8_t>(i);
      chunks.push_back({i * 8192ULL, i * 8192ULL, 8192, 8192, digest});
    }
    return bootseer::ChunkMap(16 * 8192, 0, 16 * 8192, {}, chunks);
  }();
  return map;
}

void check(std::span<const std::byte> bytes) {
  try {
    const auto trace = bootseer::Trace::parse(bytes);
    if (trace.records().size() * 32 + 64 > bytes.size()) std::abort();
    std::uint64_t last = 0;
    for (const auto& entry : trace.plan(small_map())) {
      if (entry.chunk >= small_map().count() || entry.t_ns < last) std::abort();
      last = entry.t_ns;
    }
    const auto merged = bootseer::Trace::merge(std::vector{trace, trace});
    if (merged.records().size() > trace.records().size()) std::abort();
  } catch (const bootseer::Error& error) {
    if (error.code() != bootseer::Errc::integrity) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  check(bytes);
  // The same with a valid header and valid checksums.
  std::vector<std::byte> fixed(64);
  bootseer::trace_format::write_header(std::span(fixed).first<64>(), 16 * 8192, 0);
  fixed.insert(fixed.end(), bytes.begin(), bytes.end());
  for (std::size_t at = 64; at + 32 <= fixed.size(); at += 32) {
    if ((static_cast<unsigned>(fixed[at + 28]) & 7) == 0) continue;  // some stay damaged
    if ((static_cast<unsigned>(fixed[at]) & 1) != 0) std::memset(&fixed[at + 3], 0, 5);
    if ((static_cast<unsigned>(fixed[at]) & 2) != 0) std::memset(&fixed[at + 24], 0, 4);
    bootseer::store_le(&fixed[at + 28], bootseer::crc32c(std::span(fixed).subspan(at, 28)));
  }
  check(fixed);
  return 0;
}
