#include "bootseer/erofs_writer.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <unordered_map>

#include "bootseer/bytes.hpp"
#include "bootseer/crc32c.hpp"
#include "bootseer/error.hpp"
#include "bootseer/sha256.hpp"
#include "bootseer/transfer.hpp"
#include "bootseer/zeros.hpp"

namespace bootseer {
namespace {

// On-disk format: fs/erofs/erofs_fs.h of Linux. Everything is little endian.
constexpr std::uint64_t kBlock = 4096;
constexpr std::uint64_t kSuperOffset = 1024;
constexpr std::size_t kSuperBytes = 128;
constexpr std::uint64_t kSlot = 32;  // an inode number is its offset in slots
constexpr std::size_t kInodeBytes = 64;
constexpr std::uint32_t kMagic = 0xE0F5E1E2;
constexpr std::uint32_t kCompatChecksum = 1;
constexpr std::uint32_t kCompatMtime = 2;
constexpr std::uint16_t kExtended = 1;        // i_format bit 0
constexpr std::uint16_t kFlatPlain = 0 << 1;  // i_format bits 1-3
constexpr std::uint16_t kFlatInline = 2 << 1;
constexpr std::size_t kDirentBytes = 12;
constexpr std::size_t kXattrHeaderBytes = 12;

std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

std::uint8_t file_type(std::uint32_t mode) {
  switch (mode & S_IFMT) {
    case S_IFREG:
      return 1;
    case S_IFDIR:
      return 2;
    case S_IFCHR:
      return 3;
    case S_IFBLK:
      return 4;
    case S_IFIFO:
      return 5;
    case S_IFSOCK:
      return 6;
    case S_IFLNK:
      return 7;
    default:
      return 0;
  }
}

// Name index and the rest of the name, as an xattr entry stores them.
std::pair<std::uint8_t, std::string> split_xattr(const std::string& name) {
  static const std::array<std::pair<const char*, std::uint8_t>, 5> kPrefixes{{{"user.", 1},
                                                                              {"system.posix_acl_access", 2},
                                                                              {"system.posix_acl_default", 3},
                                                                              {"trusted.", 4},
                                                                              {"security.", 6}}};
  for (const auto& [prefix, index] : kPrefixes) {
    if (name.starts_with(prefix)) return {index, name.substr(std::strlen(prefix))};
  }
  return {0, name};
}

std::vector<std::byte> encode_xattrs(const TreeNode& node) {
  std::vector<std::byte> out;
  for (const auto& [name, value] : node.xattrs) {
    const auto [index, rest] = split_xattr(name);
    if (index == 0) continue;
    if (rest.size() > 255 || value.size() > 65535) {
      throw Error(Errc::usage,
                  "the extended attribute " + name.substr(0, 60) + " is longer than EROFS can hold");
    }
    if (out.empty()) out.resize(kXattrHeaderBytes);
    const std::size_t at = out.size();
    out.resize(round_up(at + 4 + rest.size() + value.size(), 4));
    out[at] = static_cast<std::byte>(rest.size());
    out[at + 1] = static_cast<std::byte>(index);
    store_le<std::uint16_t>(&out[at + 2], static_cast<std::uint16_t>(value.size()));
    std::memcpy(out.data() + at + 4, rest.data(), rest.size());
    std::memcpy(out.data() + at + 4 + rest.size(), value.data(), value.size());
  }
  return out;
}

struct Placed {
  TreeNode* node = nullptr;
  TreeNode* parent = nullptr;     // of a directory, for ".."
  std::uint64_t offset = 0;       // of the inode in the image
  std::uint64_t body_bytes = 0;   // directory or symbolic link
  bool is_inline = false;         // body follows the inode
  std::uint64_t data_offset = 0;  // of everything else that has data
  std::uint32_t links = 0;
  std::vector<std::byte> xattrs;

  std::uint64_t nid() const { return offset / kSlot; }
};

class Writer {
 public:
  Writer(Tree& tree, const std::string& path, const ProgressCallback& progress)
      : tree_(tree),
        path_(path),
        progress_(progress),
        fd_(::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600)) {
    if (!fd_) throw_errno(path);
  }

  ErofsImage run() {
    collect(tree_.root(), tree_.root());
    place_metadata();
    place_data();
    write_metadata();
    write_data();
    if (::ftruncate(fd_.get(), static_cast<off_t>(image_.image_bytes)) != 0) throw_errno(path_);
    return std::move(image_);
  }

 private:
  // Depth first, so that what lies in one directory lies together.
  void collect(TreeNode& node, TreeNode& parent) {
    if (const auto [known, fresh] = index_.try_emplace(&node, placed_.size()); !fresh) return;
    // The kernel reads one block of a symbolic link's target.
    if (node.is_symlink() && (node.target.empty() || node.target.size() >= kBlock)) {
      throw Error(Errc::usage,
                  "a symbolic link's target has " + std::to_string(node.target.size()) + " bytes");
    }
    Placed placed;
    placed.node = &node;
    placed.parent = &parent;
    placed.links = node.is_dir() ? 2 : node.links;
    placed.xattrs = encode_xattrs(node);
    placed_.push_back(std::move(placed));
    const std::size_t self = placed_.size() - 1;
    for (const auto& [name, child] : node.children) {
      if (name.size() > 255) throw Error(Errc::usage, "a file name is longer than 255 bytes");
      if (child->is_dir()) ++placed_[self].links;
      collect(*child, node);
    }
  }

  static std::uint64_t directory_bytes(const TreeNode& node) {
    std::uint64_t full_blocks = 0;
    std::uint64_t used = 0;
    for_each_entry(node, [&](const std::string& name, const TreeNode*) {
      const std::uint64_t need = kDirentBytes + name.size();
      if (used + need > kBlock) {
        ++full_blocks;
        used = 0;
      }
      used += need;
    });
    return full_blocks * kBlock + used;
  }

  // "." and ".." take their places in byte order; nullptr stands for them.
  template <typename F>
  static void for_each_entry(const TreeNode& node, F&& visit) {
    static const std::string kDot = ".";
    static const std::string kDotDot = "..";
    int dots = 0;
    const auto visit_dots_before = [&](const std::string* name) {
      if (dots == 0 && (name == nullptr || kDot < *name)) {
        visit(kDot, nullptr);
        ++dots;
      }
      if (dots == 1 && (name == nullptr || kDotDot < *name)) {
        visit(kDotDot, nullptr);
        ++dots;
      }
    };
    for (const auto& [name, child] : node.children) {
      visit_dots_before(&name);
      visit(name, child.get());
    }
    visit_dots_before(nullptr);
  }

  void place_metadata() {
    std::uint64_t at = kSuperOffset + kSuperBytes;
    for (Placed& placed : placed_) {
      const TreeNode& node = *placed.node;
      if (node.is_dir()) placed.body_bytes = directory_bytes(node);
      if (node.is_symlink()) placed.body_bytes = node.target.size();
      const std::uint64_t head = kInodeBytes + placed.xattrs.size();
      placed.is_inline = placed.body_bytes > 0 && round_up(head, 4) + placed.body_bytes <= kBlock;
      const std::uint64_t whole = head + (placed.is_inline ? placed.body_bytes : 0);
      at = round_up(at, kSlot);
      // An inode does not straddle a block, and neither may what is inline behind it.
      const std::uint64_t in_block = at % kBlock;
      const std::uint64_t together = placed.is_inline ? whole : kInodeBytes;
      if (in_block + together > kBlock) at = round_up(at, kBlock);
      placed.offset = at;
      at += whole;
    }
    at = round_up(at, kBlock);
    for (Placed& placed : placed_) {
      if (placed.body_bytes == 0 || placed.is_inline) continue;
      placed.data_offset = at;
      at += round_up(placed.body_bytes, kBlock);
    }
    image_.meta_bytes = at;
    image_.files = placed_.size();
    if (placed_.front().nid() > 65535) throw Error(Errc::internal, "the root inode has no 16-bit number");
  }

  void place_data() {
    std::uint64_t at = image_.meta_bytes;
    for (Placed& placed : placed_) {
      if (!placed.node->is_regular() || placed.node->size_bytes == 0) continue;
      placed.data_offset = at;
      image_.extents.push_back(at);
      at += round_up(placed.node->size_bytes, kBlock);
    }
    image_.image_bytes = at;
    if (at / kBlock > 0xFFFFFFFFULL) throw Error(Errc::usage, "the image would be larger than 16 TiB");
  }

  const Placed& placed_of(const TreeNode* node) const { return placed_[index_.at(node)]; }

  void write_metadata() {
    std::vector<std::byte> zone(image_.meta_bytes);
    std::uint32_t number = 0;
    for (const Placed& placed : placed_) {
      std::byte* at = zone.data() + placed.offset;
      encode_inode(placed, ++number, at);
      std::copy(placed.xattrs.begin(), placed.xattrs.end(), at + kInodeBytes);
      std::byte* body =
          placed.is_inline ? at + kInodeBytes + placed.xattrs.size() : zone.data() + placed.data_offset;
      if (placed.node->is_dir()) encode_directory(placed, body);
      if (placed.node->is_symlink())
        std::memcpy(body, placed.node->target.data(), placed.node->target.size());
    }
    encode_super(zone);
    write(zone, 0);
  }

  void encode_inode(const Placed& placed, std::uint32_t number, std::byte* at) const {
    const TreeNode& node = *placed.node;
    std::uint64_t size = placed.body_bytes;
    std::uint32_t location = static_cast<std::uint32_t>(placed.data_offset / kBlock);
    if (node.is_regular()) size = node.size_bytes;
    const std::uint32_t type = node.mode & S_IFMT;
    if (type == S_IFCHR || type == S_IFBLK) {  // new_encode_dev() of Linux
      location = (node.dev_minor & 0xFFU) | (node.dev_major << 8) | ((node.dev_minor & ~0xFFU) << 12);
    }
    const std::uint16_t layout = placed.is_inline ? kFlatInline : kFlatPlain;
    const std::size_t xattr_bytes = placed.xattrs.size();
    const std::size_t xattr_count = xattr_bytes == 0 ? 0 : (xattr_bytes - kXattrHeaderBytes) / 4 + 1;
    if (xattr_count > 65535)
      throw Error(Errc::usage, "a file has more extended attributes than EROFS can hold");
    store_le<std::uint16_t>(at, static_cast<std::uint16_t>(kExtended | layout));
    store_le<std::uint16_t>(at + 2, static_cast<std::uint16_t>(xattr_count));
    store_le<std::uint16_t>(at + 4, static_cast<std::uint16_t>(node.mode));
    store_le<std::uint64_t>(at + 8, size);
    store_le<std::uint32_t>(at + 16, location);
    store_le<std::uint32_t>(at + 20, number);
    store_le<std::uint32_t>(at + 24, node.uid);
    store_le<std::uint32_t>(at + 28, node.gid);
    store_le<std::uint64_t>(at + 32, static_cast<std::uint64_t>(node.mtime_s));
    store_le<std::uint32_t>(at + 40, node.mtime_ns);
    store_le<std::uint32_t>(at + 44, placed.links);
  }

  void encode_directory(const Placed& placed, std::byte* body) const {
    struct Entry {
      const std::string* name;
      const Placed* target;
    };
    std::vector<Entry> block;
    std::uint64_t used = 0;
    const auto flush = [&] {
      std::size_t name_at = block.size() * kDirentBytes;
      for (std::size_t i = 0; i < block.size(); ++i) {
        std::byte* entry = body + i * kDirentBytes;
        store_le<std::uint64_t>(entry, block[i].target->nid());
        store_le<std::uint16_t>(entry + 8, static_cast<std::uint16_t>(name_at));
        entry[10] = static_cast<std::byte>(file_type(block[i].target->node->mode));
        std::memcpy(body + name_at, block[i].name->data(), block[i].name->size());
        name_at += block[i].name->size();
      }
      body += kBlock;
      block.clear();
      used = 0;
    };
    for_each_entry(*placed.node, [&](const std::string& name, const TreeNode* child) {
      const std::uint64_t need = kDirentBytes + name.size();
      if (used + need > kBlock) flush();
      const TreeNode* target = child;
      if (child == nullptr) target = name == "." ? placed.node : placed.parent;
      block.push_back({&name, &placed_of(target)});
      used += need;
    });
    flush();
  }

  void encode_super(std::vector<std::byte>& zone) const {
    std::byte* at = zone.data() + kSuperOffset;
    store_le<std::uint32_t>(at, kMagic);
    store_le<std::uint32_t>(at + 8, kCompatChecksum | kCompatMtime);
    at[12] = std::byte{12};  // blkszbits
    store_le<std::uint16_t>(at + 14, static_cast<std::uint16_t>(placed_.front().nid()));
    store_le<std::uint64_t>(at + 16, placed_.size());
    store_le<std::uint32_t>(at + 36, static_cast<std::uint32_t>(image_.image_bytes / kBlock));
    // The identity of a deterministic image is its content, here that of all metadata.
    const Digest digest = sha256(zone);
    std::memcpy(at + 48, digest.data(), 16);
    // The kernel's crc32c does not invert at the end, and runs from the superblock to the end of its block.
    const std::span<const std::byte> covered(at, kBlock - kSuperOffset);
    store_le<std::uint32_t>(at + 4, ~crc32c(covered));
  }

  void write_data() {
    std::uint64_t done = image_.meta_bytes;
    std::uint64_t reported = 0;
    for (const Placed& placed : placed_) {
      if (!placed.node->is_regular() || placed.node->size_bytes == 0) continue;
      std::uint64_t at = placed.data_offset;
      tree_.read(*placed.node, [&](std::span<const std::byte> bytes) {
        write(bytes, at);
        at += bytes.size();
        done += bytes.size();
      });
      if (progress_ && done - reported >= (32U << 20)) {
        reported = done;
        progress_(done, image_.image_bytes);
      }
    }
    if (progress_) progress_(image_.image_bytes, image_.image_bytes);
  }

  // Zeros stay holes, so that a sparse file costs no space here either.
  void write(std::span<const std::byte> bytes, std::uint64_t offset) {
    if (is_zeros(bytes)) return;
    if (const int error = pwrite_all(fd_.get(), bytes, offset); error != 0) throw_errno(path_, error);
  }

  Tree& tree_;
  const std::string& path_;
  const ProgressCallback& progress_;
  UniqueFd fd_;
  std::vector<Placed> placed_;
  std::unordered_map<const TreeNode*, std::size_t> index_;
  ErofsImage image_;
};

}  // namespace

ErofsImage write_erofs(Tree& tree, const std::string& path, const ProgressCallback& progress) {
  return Writer(tree, path, progress).run();
}

}  // namespace bootseer
