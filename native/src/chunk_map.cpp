#include "bootseer/chunk_map.hpp"

#include <zstd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <tuple>

#include "bootseer/bytes.hpp"
#include "bootseer/crc32c.hpp"
#include "bootseer/error.hpp"
#include "bootseer/read_whole_file.hpp"

namespace bootseer {
namespace {

constexpr char kMagic[] = "BSRCMAP1";
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kHeaderBytes = 96;
constexpr std::size_t kEntryBytes = 56;
constexpr std::size_t kCrcOffset = 92;
constexpr std::uint64_t kMaxImageBytes = std::uint64_t{kMaxChunkCount} * kMaxChunkBytes;

[[noreturn]] void reject(const std::string& why) {
  throw Error(Errc::integrity, "chunk map: " + why);
}

[[noreturn]] void reject(std::size_t index, const std::string& why) {
  reject("chunk " + std::to_string(index) + ": " + why);
}

std::uint32_t checksum(std::span<const std::byte> bytes) {
  constexpr std::byte kZero[4] = {};
  const std::uint32_t head = crc32c(bytes.first(kCrcOffset));
  return crc32c(bytes.subspan(kHeaderBytes), crc32c(kZero, head));
}

// Few sizes occur in one map, and a hostile one cannot have more than 257 (multiples of 4 KiB, and the last).
class ZeroDigests {
 public:
  const Digest& of(std::uint32_t raw_bytes) {
    auto [at, is_new] = known_.try_emplace(raw_bytes);
    if (is_new) {
      static const std::vector<std::byte> zeros(kMaxChunkBytes);
      at->second = sha256(std::span(zeros).first(raw_bytes));
    }
    return at->second;
  }

 private:
  std::map<std::uint32_t, Digest> known_;
};

}  // namespace

ChunkMap::ChunkMap(std::uint64_t image_bytes, std::uint64_t meta_bytes, std::uint64_t blob_bytes,
                   const Digest& blob_sha256, std::vector<Chunk> chunks)
    : image_bytes_(image_bytes),
      meta_bytes_(meta_bytes),
      blob_bytes_(blob_bytes),
      blob_sha256_(blob_sha256),
      chunks_(std::move(chunks)) {
  validate();
  by_mib_.reserve(static_cast<std::size_t>(image_bytes_ / kMaxChunkBytes + 1));
  for (std::uint32_t i = 0; i < count(); ++i) {
    const std::uint64_t end = chunks_[i].raw_offset + chunks_[i].raw_bytes;
    while (std::uint64_t{by_mib_.size()} * kMaxChunkBytes < end) by_mib_.push_back(i);
  }
  digest_ = sha256(serialize());
}

void ChunkMap::validate() const {
  if (chunks_.size() > kMaxChunkCount) reject("more than " + std::to_string(kMaxChunkCount) + " chunks");
  if (image_bytes_ > kMaxImageBytes) reject("image is too large");
  if (meta_bytes_ > image_bytes_) reject("metadata is longer than the image");
  ZeroDigests zero_digests;
  std::uint64_t expected = 0;
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    const Chunk& chunk = chunks_[i];
    if (chunk.raw_bytes == 0 || chunk.raw_bytes > kMaxChunkBytes) reject(i, "bad raw length");
    if (chunk.raw_offset != expected) {
      reject(i, chunk.raw_offset < expected ? "overlaps the one before" : "leaves a hole before it");
    }
    if (chunk.raw_bytes % kChunkAlignment != 0 && i + 1 != chunks_.size()) reject(i, "unaligned raw length");
    expected += chunk.raw_bytes;  // cannot overflow: at most 2^22 chunks of 2^20 bytes
    if (chunk.is_zeros()) {
      if (chunk.sha256 != zero_digests.of(chunk.raw_bytes)) reject(i, "has no data and is not all zeros");
      continue;
    }
    if (chunk.blob_bytes > ZSTD_compressBound(chunk.raw_bytes)) reject(i, "blob range is too long");
    if (chunk.blob_offset > blob_bytes_ || chunk.blob_bytes > blob_bytes_ - chunk.blob_offset) {
      reject(i, "blob range lies outside the blob");
    }
  }
  if (expected != image_bytes_) reject("chunks do not cover the image");

  std::vector<std::uint32_t> order(chunks_.size());
  std::iota(order.begin(), order.end(), 0U);
  std::erase_if(order, [this](std::uint32_t i) { return chunks_[i].is_zeros(); });
  const auto by_blob_range = [this](std::uint32_t a, std::uint32_t b) {
    const Chunk& left = chunks_[a];
    const Chunk& right = chunks_[b];
    return std::tie(left.blob_offset, left.blob_bytes, a) < std::tie(right.blob_offset, right.blob_bytes, b);
  };
  // Writers emit chunks in blob order, so most maps need no sort.
  if (!std::is_sorted(order.begin(), order.end(), by_blob_range)) {
    std::sort(order.begin(), order.end(), by_blob_range);
  }
  for (std::size_t i = 1; i < order.size(); ++i) {
    const Chunk& before = chunks_[order[i - 1]];
    const Chunk& chunk = chunks_[order[i]];
    if (chunk.blob_offset == before.blob_offset && chunk.blob_bytes == before.blob_bytes) {
      if (chunk.raw_bytes != before.raw_bytes || chunk.sha256 != before.sha256) {
        reject(order[i], "shares a blob range with a different chunk");
      }
    } else if (chunk.blob_offset < before.blob_offset + before.blob_bytes) {
      reject(order[i], "blob range overlaps another's");
    }
  }
}

ChunkMap ChunkMap::parse(std::span<const std::byte> bytes) {
  if (bytes.size() < kHeaderBytes) reject("shorter than its header");
  const std::byte* header = bytes.data();
  if (std::memcmp(header, kMagic, 8) != 0) reject("wrong magic");
  if (load_le<std::uint32_t>(header + 8) != kVersion) reject("unknown version");
  if (load_le<std::uint32_t>(header + 12) != kHeaderBytes) reject("wrong header length");
  const auto count = load_le<std::uint32_t>(header + 72);
  if (count > kMaxChunkCount) reject("more than " + std::to_string(kMaxChunkCount) + " chunks");
  if (bytes.size() != kHeaderBytes + count * kEntryBytes) reject("length does not match the chunk count");
  if (load_le<std::uint32_t>(header + kCrcOffset) != checksum(bytes)) reject("checksum mismatch");
  if (load_le<std::uint32_t>(header + 76) != 0) reject("unknown flags");
  if (std::any_of(header + 80, header + kCrcOffset, [](std::byte b) { return b != std::byte{0}; })) {
    reject("reserved bytes are not zero");
  }
  Digest blob_sha256;
  std::memcpy(blob_sha256.data(), header + 40, blob_sha256.size());
  std::vector<Chunk> chunks(count);
  const std::byte* at = header + kHeaderBytes;
  for (Chunk& chunk : chunks) {
    chunk.raw_offset = load_le<std::uint64_t>(at);
    chunk.blob_offset = load_le<std::uint64_t>(at + 8);
    chunk.raw_bytes = load_le<std::uint32_t>(at + 16);
    chunk.blob_bytes = load_le<std::uint32_t>(at + 20);
    std::memcpy(chunk.sha256.data(), at + 24, chunk.sha256.size());
    at += kEntryBytes;
  }
  return ChunkMap(load_le<std::uint64_t>(header + 16), load_le<std::uint64_t>(header + 24),
                  load_le<std::uint64_t>(header + 32), blob_sha256, std::move(chunks));
}

ChunkMap ChunkMap::load(const std::string& path) {
  // One byte more than the largest map, so that a longer file is refused rather than cut.
  return parse(read_whole_file(path, kHeaderBytes + std::uint64_t{kMaxChunkCount} * kEntryBytes + 1));
}

std::vector<std::byte> ChunkMap::serialize() const {
  std::vector<std::byte> bytes(kHeaderBytes + chunks_.size() * kEntryBytes);
  std::byte* header = bytes.data();
  std::memcpy(header, kMagic, 8);
  store_le(header + 8, kVersion);
  store_le(header + 12, static_cast<std::uint32_t>(kHeaderBytes));
  store_le(header + 16, image_bytes_);
  store_le(header + 24, meta_bytes_);
  store_le(header + 32, blob_bytes_);
  std::memcpy(header + 40, blob_sha256_.data(), blob_sha256_.size());
  store_le(header + 72, count());
  std::byte* at = header + kHeaderBytes;
  for (const Chunk& chunk : chunks_) {
    store_le(at, chunk.raw_offset);
    store_le(at + 8, chunk.blob_offset);
    store_le(at + 16, chunk.raw_bytes);
    store_le(at + 20, chunk.blob_bytes);
    std::memcpy(at + 24, chunk.sha256.data(), chunk.sha256.size());
    at += kEntryBytes;
  }
  store_le(header + kCrcOffset, checksum(bytes));
  return bytes;
}

std::uint32_t ChunkMap::index_of(std::uint64_t raw_offset) const noexcept {
  const auto mib = static_cast<std::size_t>(raw_offset / kMaxChunkBytes);
  const auto first = chunks_.begin() + by_mib_[mib];
  const auto last = mib + 1 < by_mib_.size() ? chunks_.begin() + by_mib_[mib + 1] + 1 : chunks_.end();
  const auto after = std::upper_bound(first, last, raw_offset, [](std::uint64_t offset, const Chunk& chunk) {
    return offset < chunk.raw_offset;
  });
  return static_cast<std::uint32_t>(after - chunks_.begin() - 1);
}

}  // namespace bootseer
