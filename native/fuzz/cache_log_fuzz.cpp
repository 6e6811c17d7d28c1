// Any bytes can be replayed, in one piece or in two, with the same result.
#include <cstdlib>
#include <vector>

#include "bootseer/bytes.hpp"
#include "bootseer/cache_log.hpp"
#include "bootseer/crc32c.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  namespace log = bootseer::cache_log;
  constexpr std::uint32_t kChunks = 64;
  const auto bytes = std::as_bytes(std::span(data, size));
  std::vector<std::byte> fixed(bytes.begin(), bytes.end());
  for (std::size_t at = 0; at + log::kRecordBytes <= fixed.size(); at += log::kRecordBytes) {
    if ((static_cast<unsigned>(fixed[at + 12]) & 15) == 0) continue;  // some stay damaged
    bootseer::store_le(&fixed[at], static_cast<std::uint32_t>(fixed[at]) % 5);
    bootseer::store_le(&fixed[at + 4], static_cast<std::uint32_t>(fixed[at + 4]) % (kChunks + 4));
    bootseer::store_le(&fixed[at + 12], bootseer::crc32c(std::span(fixed).subspan(at, 12)));
  }
  for (const auto& input : {std::vector<std::byte>(bytes.begin(), bytes.end()), fixed}) {
    log::Replay whole(kChunks);
    const std::size_t applied = whole.apply(input);
    if (applied > input.size() || applied % log::kRecordBytes != 0) std::abort();
    log::Replay pieces(kChunks);
    const std::size_t half = input.size() / 2 / log::kRecordBytes * log::kRecordBytes;
    std::size_t again = pieces.apply(std::span(input).first(half));
    if (again == half) again += pieces.apply(std::span(input).subspan(half));
    if (again != applied || whole.records() != pieces.records()) std::abort();
    for (std::uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      if (whole.is_claimed(chunk) != pieces.is_claimed(chunk)) std::abort();
      if (whole.is_claimed(chunk) && whole.claims()[chunk].record >= whole.records()) std::abort();
      if (whole.is_proven(chunk) != pieces.is_proven(chunk)) std::abort();
    }
  }
  return 0;
}
