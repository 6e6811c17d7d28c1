// Any bytes are a valid chunk map or an IntegrityError; a valid one survives a round trip and finds its
// offsets.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "bootseer/bytes.hpp"
#include "bootseer/chunk_map.hpp"
#include "bootseer/crc32c.hpp"
#include "bootseer/error.hpp"
#include "bootseer/frame_index.hpp"

namespace {

void check(std::span<const std::byte> bytes) {
  try {
    const auto map = bootseer::ChunkMap::parse(bytes);
    const auto again = map.serialize();
    if (again.size() != bytes.size() || std::memcmp(again.data(), bytes.data(), again.size()) != 0)
      std::abort();
    for (std::uint32_t i = 0; i < map.count(); ++i) {
      if (map.index_of(map.chunk(i).raw_offset) != i) std::abort();
    }
    const bootseer::FrameIndex frames(map);
  } catch (const bootseer::Error& error) {
    if (error.code() != bootseer::Errc::integrity) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  check(bytes);
  if (size < 96) return 0;
  // The same with the fields right that would end the parse early, to reach the rules behind them.
  std::vector<std::byte> fixed(bytes.begin(), bytes.end());
  fixed.resize(96 + (size - 96) / 56 * 56);
  std::memcpy(fixed.data(), "BSRCMAP1", 8);
  bootseer::store_le(&fixed[8], std::uint32_t{1});
  bootseer::store_le(&fixed[12], std::uint32_t{96});
  bootseer::store_le(&fixed[72], static_cast<std::uint32_t>((fixed.size() - 96) / 56));
  std::memset(&fixed[76], 0, 20);
  if (fixed.size() > 96 && (data[0] & 1) != 0) {  // a small geometry that can be right
    std::uint64_t raw = 0;
    for (std::size_t at = 96; at < fixed.size(); at += 56) {
      bootseer::store_le(&fixed[at], raw);
      const std::uint32_t length = (static_cast<std::uint32_t>(fixed[at + 16]) % 8 + 1) * 4096;
      bootseer::store_le(&fixed[at + 8], static_cast<std::uint64_t>(fixed[at + 8]) * 64);
      bootseer::store_le(&fixed[at + 16], length);
      bootseer::store_le(&fixed[at + 20], static_cast<std::uint32_t>(fixed[at + 20]) + 1);
      raw += length;
    }
    bootseer::store_le(&fixed[16], raw);
    bootseer::store_le(&fixed[24], std::uint64_t{0});
    bootseer::store_le(&fixed[32], std::uint64_t{1} << 20);
  }
  bootseer::store_le(&fixed[92], bootseer::crc32c(fixed));
  check(fixed);
  return 0;
}
