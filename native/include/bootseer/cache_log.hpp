// The records of a blob's ready.log, and what they say. Pure: no files. docs/formats/cache.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "bootseer/sha256.hpp"

namespace bootseer::cache_log {

inline constexpr std::size_t kHeaderBytes = 64;
inline constexpr std::size_t kRecordBytes = 16;

enum Kind : std::uint32_t {
  kReady = 1,    // value: chunk; data_crc: CRC-32C of its raw bytes
  kDropped = 2,  // value: chunk
  kDurable = 3,  // value: the data of that many leading records is on disk
};

using Header = std::array<std::byte, kHeaderBytes>;
using Record = std::array<std::byte, kRecordBytes>;

Header make_header(const Digest& map_digest, std::uint32_t chunk_count) noexcept;
bool is_header(std::span<const std::byte> bytes, const Digest& map_digest,
               std::uint32_t chunk_count) noexcept;
Record make_record(Kind kind, std::uint32_t value, std::uint32_t data_crc) noexcept;

// State after some prefix of the log.
class Replay {
 public:
  static constexpr std::uint32_t kNever = 0xffffffff;
  struct Claim {
    std::uint32_t record = kNever;  // index of the record that claims the chunk
    std::uint32_t data_crc = 0;
  };

  explicit Replay(std::uint32_t chunk_count) : claims_(chunk_count) {}

  // Applies records until the first that is not valid. Returns how many bytes were applied (whole records).
  std::size_t apply(std::span<const std::byte> bytes);

  std::uint32_t records() const noexcept { return records_; }
  bool has_unproven() const noexcept { return last_ready_end_ > durable_; }
  const std::vector<Claim>& claims() const noexcept { return claims_; }
  bool is_claimed(std::uint32_t chunk) const noexcept { return claims_[chunk].record != kNever; }
  bool is_proven(std::uint32_t chunk) const noexcept { return claims_[chunk].record < durable_; }
  void forget(std::uint32_t chunk) noexcept { claims_[chunk] = {}; }

 private:
  std::vector<Claim> claims_;
  std::uint32_t records_ = 0;
  std::uint32_t durable_ = 0;
  std::uint32_t last_ready_end_ = 0;  // index of the last ready record, plus one
};

}  // namespace bootseer::cache_log
