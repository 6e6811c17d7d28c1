// A file system tree on its way into an image, from a root directory or from the layers of an OCI image.
#pragma once

#include <sys/types.h>

#include <bootseer/fd.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace bootseer {

// Called now and then with the bytes done so far and those that there are to do. What it throws passes
// through.
using ProgressCallback = std::function<void(std::uint64_t done_bytes, std::uint64_t total_bytes)>;

// Whether an image keeps this extended attribute: not what the kernel makes up for a mount, not labels that
// only the policy of the machine of origin understands.
bool keeps_xattr(const std::string& name);

// One inode. Several names may share it (hard links).
struct TreeNode {
  std::uint32_t mode = 0;
  std::uint32_t uid = 0;
  std::uint32_t gid = 0;
  std::int64_t mtime_s = 0;
  std::uint32_t mtime_ns = 0;
  std::uint32_t dev_major = 0;
  std::uint32_t dev_minor = 0;
  std::uint64_t size_bytes = 0;
  std::uint32_t links = 0;                    // names that refer to it; directories are counted by the writer
  std::map<std::string, std::string> xattrs;  // full name → value
  std::string target;                         // of a symbolic link
  std::string path;                           // regular file of a directory source
  std::uint64_t spool_offset = 0;             // regular file of a layer, when path is empty
  std::size_t layer = 0;                      // the layer that put it here
  std::map<std::string, std::shared_ptr<TreeNode>> children;  // byte-wise order, as EROFS wants it

  bool is_dir() const noexcept { return (mode & 0170000U) == 0040000U; }
  bool is_regular() const noexcept { return (mode & 0170000U) == 0100000U; }
  bool is_symlink() const noexcept { return (mode & 0170000U) == 0120000U; }
};

// What a tree's regular files are read from.
class Tree {
 public:
  Tree();

  // Walks a directory; no symbolic link below it is followed. Throws std::system_error, Error(usage).
  static Tree from_directory(const std::string& root);

  // Applies layer tars (plain, gzip or zstd) in order: OCI image specification 1.1, layer.md. File contents
  // go to an unlinked spool file in `spool_dir`. Throws Error(integrity) for what is no layer.
  static Tree from_layers(const std::vector<std::string>& layers, const std::string& spool_dir,
                          const ProgressCallback& progress = {});

  TreeNode& root() noexcept { return *root_; }

  // Hands the file's bytes to `sink` in order. Throws Error(usage) when the file is no longer what it was
  // when the tree was made: half an old and half a new file is what no machine ever had.
  void read(const TreeNode& node, const std::function<void(std::span<const std::byte>)>& sink) const;

 private:
  std::shared_ptr<TreeNode> root_;
  UniqueFd spool_;
};

}  // namespace bootseer
