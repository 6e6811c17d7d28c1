// Cuts an image into chunks and writes them as one blob of zstd frames (docs/formats/image.md).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bootseer/chunk_map.hpp"
#include "bootseer/erofs_writer.hpp"

namespace bootseer {

struct ChunkerOptions {
  std::uint32_t average_bytes = 256U << 10;  // of the content-defined cuts; a chunk is at most kMaxChunkBytes
  int level = 3;                             // zstd
  unsigned threads = 2;
};

// Where to cut: depends on the content of 4 KiB pages only, so that equal content gives equal chunks wherever
// it lies. `feed` pages in order; it answers whether a chunk ends behind the page.
class PageCutter {
 public:
  explicit PageCutter(std::uint32_t average_bytes);
  bool feed(std::span<const std::byte> page) noexcept;
  void cut() noexcept { pages_ = 0; }  // a cut for another reason
  std::uint32_t pages() const noexcept { return pages_; }

 private:
  std::uint64_t mask_;
  std::uint32_t min_pages_;
  std::uint32_t max_pages_;
  std::uint32_t pages_ = 0;
};

// `extents` are offsets at which cutting pays (starts of files), ascending. Identical chunks are stored once.
ChunkMap chunk_image(const std::string& image_path, const std::string& blob_path, std::uint64_t meta_bytes,
                     std::span<const std::uint64_t> extents, const ChunkerOptions& options,
                     const ProgressCallback& progress);

}  // namespace bootseer
