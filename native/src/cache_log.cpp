#include "bootseer/cache_log.hpp"

#include <algorithm>
#include <cstring>

#include "bootseer/bytes.hpp"
#include "bootseer/crc32c.hpp"

namespace bootseer::cache_log {
namespace {

constexpr char kMagic[] = "BSRCLOG1";
constexpr std::uint32_t kVersion = 1;

}  // namespace

Header make_header(const Digest& map_digest, std::uint32_t chunk_count) noexcept {
  Header header{};
  std::memcpy(header.data(), kMagic, 8);
  store_le(header.data() + 8, kVersion);
  store_le(header.data() + 12, static_cast<std::uint32_t>(kRecordBytes));
  std::memcpy(header.data() + 16, map_digest.data(), map_digest.size());
  store_le(header.data() + 48, chunk_count);
  store_le(header.data() + 60, crc32c(std::span(header).first(60)));
  return header;
}

bool is_header(std::span<const std::byte> bytes, const Digest& map_digest,
               std::uint32_t chunk_count) noexcept {
  const Header expected = make_header(map_digest, chunk_count);
  return bytes.size() >= expected.size() && std::equal(expected.begin(), expected.end(), bytes.begin());
}

Record make_record(Kind kind, std::uint32_t value, std::uint32_t data_crc) noexcept {
  Record record;
  store_le(record.data(), static_cast<std::uint32_t>(kind));
  store_le(record.data() + 4, value);
  store_le(record.data() + 8, data_crc);
  store_le(record.data() + 12, crc32c(std::span(record).first(12)));
  return record;
}

std::size_t Replay::apply(std::span<const std::byte> bytes) {
  std::size_t applied = 0;
  for (; bytes.size() - applied >= kRecordBytes && records_ + 1 < kNever;
       applied += kRecordBytes, ++records_) {
    const auto record = bytes.subspan(applied, kRecordBytes);
    if (load_le<std::uint32_t>(record.data() + 12) != crc32c(record.first(12))) break;
    const auto kind = load_le<std::uint32_t>(record.data());
    const auto value = load_le<std::uint32_t>(record.data() + 4);
    if (kind == kDurable) {
      if (value > records_) break;  // vouches for records that do not exist
      durable_ = std::max(durable_, value);
    } else if (kind == kReady || kind == kDropped) {
      if (value >= claims_.size()) break;
      if (kind == kReady) last_ready_end_ = records_ + 1;
      claims_[value] =
          kind == kDropped ? Claim{} : Claim{records_, load_le<std::uint32_t>(record.data() + 8)};
    } else {
      break;
    }
  }
  return applied;
}

}  // namespace bootseer::cache_log
