// The chunk map of an image: which bytes of the blob make which bytes of the image.
// docs/formats/chunk-map.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bootseer/sha256.hpp"

namespace bootseer {

inline constexpr std::uint32_t kMaxChunkBytes = 1U << 20;
inline constexpr std::uint32_t kMaxChunkCount = 1U << 22;
inline constexpr std::uint32_t kChunkAlignment = 4096;

struct Chunk {
  std::uint64_t raw_offset = 0;
  std::uint64_t blob_offset = 0;
  std::uint32_t raw_bytes = 0;
  std::uint32_t blob_bytes = 0;  // 0: all zeros; raw_bytes: stored as is; else one zstd frame
  Digest sha256{};               // of the raw bytes

  bool is_zeros() const noexcept { return blob_bytes == 0; }
  bool is_stored() const noexcept { return blob_bytes == raw_bytes; }
};

// Immutable and valid: the constructors throw Error(integrity) for anything that breaks a rule of the format.
class ChunkMap {
 public:
  ChunkMap(std::uint64_t image_bytes, std::uint64_t meta_bytes, std::uint64_t blob_bytes,
           const Digest& blob_sha256, std::vector<Chunk> chunks);
  static ChunkMap parse(std::span<const std::byte> bytes);
  static ChunkMap load(const std::string& path);

  std::vector<std::byte> serialize() const;

  std::uint64_t image_bytes() const noexcept { return image_bytes_; }
  std::uint64_t meta_bytes() const noexcept { return meta_bytes_; }  // leading bytes that are metadata
  std::uint64_t blob_bytes() const noexcept { return blob_bytes_; }
  const Digest& blob_sha256() const noexcept { return blob_sha256_; }
  const Digest& digest() const noexcept { return digest_; }  // sha256 of serialize()
  std::uint32_t count() const noexcept { return static_cast<std::uint32_t>(chunks_.size()); }
  const Chunk& chunk(std::uint32_t index) const noexcept { return chunks_[index]; }
  std::span<const Chunk> chunks() const noexcept { return chunks_; }

  // The chunk that holds byte `raw_offset`, which must be below image_bytes().
  std::uint32_t index_of(std::uint64_t raw_offset) const noexcept;

 private:
  void validate() const;

  std::uint64_t image_bytes_;
  std::uint64_t meta_bytes_;
  std::uint64_t blob_bytes_;
  Digest blob_sha256_;
  std::vector<Chunk> chunks_;
  std::vector<std::uint32_t> by_mib_;  // for each MiB of the image, the chunk that holds its first byte
  Digest digest_{};
};

}  // namespace bootseer
