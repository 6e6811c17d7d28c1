// Writes a tree as an uncompressed, read-only EROFS image (docs/formats/image.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bootseer/tree.hpp"

namespace bootseer {

struct ErofsImage {
  std::uint64_t image_bytes = 0;
  std::uint64_t meta_bytes = 0;        // superblock, inodes, directories, symbolic links, xattrs
  std::uint64_t files = 0;             // inodes
  std::vector<std::uint64_t> extents;  // offsets at which a regular file's data starts, ascending
};

// Deterministic: equal trees give equal bytes. Throws std::system_error (ENOSPC, …), Error(usage) for a tree
// that EROFS cannot hold.
ErofsImage write_erofs(Tree& tree, const std::string& path, const ProgressCallback& progress);

}  // namespace bootseer
