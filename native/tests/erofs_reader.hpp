// Reads the EROFS images that we write, from the kernel's description (fs/erofs/erofs_fs.h) and not from the
// writer's code. Everything out of place throws.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "bootseer/bytes.hpp"
#include "bootseer/crc32c.hpp"

namespace bootseer::test {

struct ErofsFile {
  std::uint64_t nid = 0;
  std::uint32_t mode = 0, uid = 0, gid = 0, mtime_ns = 0, links = 0, inode = 0, location = 0;
  std::uint64_t size_bytes = 0;
  std::int64_t mtime_s = 0;
  std::map<std::string, std::string> xattrs;
  std::string body;  // of a regular file or symbolic link
  std::map<std::string, ErofsFile> children;
  std::vector<std::string> order;  // names as they lie on disk, with "." and ".."

  const ErofsFile& at(const std::string& path) const {
    const ErofsFile* file = this;
    for (std::size_t from = 0; from < path.size();) {
      const std::size_t end = std::min(path.find('/', from), path.size());
      file = &file->children.at(path.substr(from, end - from));
      from = end + 1;
    }
    return *file;
  }
};

class ErofsReader {
 public:
  explicit ErofsReader(std::span<const std::byte> image) : image_(image) {
    constexpr std::size_t kSuper = 1024;
    require(image.size() >= 4096 && image.size() % 4096 == 0, "size");
    require(u32(kSuper) == 0xE0F5E1E2U, "magic");
    std::vector<std::byte> covered(image.begin() + kSuper, image.begin() + 4096);
    const std::uint32_t sum = load_le<std::uint32_t>(&covered[4]);
    store_le<std::uint32_t>(&covered[4], 0);
    require(sum == ~crc32c(covered), "checksum");
    require(u8(kSuper + 12) == 12, "block size");
    require(u32(kSuper + 36) * 4096ULL == image.size(), "blocks");
    require(u32(kSuper + 40) == 0, "meta_blkaddr");
    require(u32(kSuper + 80) == 0, "incompatible features");
    inodes = load_le<std::uint64_t>(at(kSuper + 16, 8));
    const std::uint64_t root_nid = u16(kSuper + 14);
    root = load(root_nid, root_nid);
  }

  ErofsFile root;
  std::uint64_t inodes = 0;

 private:
  static void require(bool condition, const char* what) {
    if (!condition) throw std::runtime_error(std::string("EROFS: ") + what);
  }
  const std::byte* at(std::uint64_t offset, std::uint64_t length) const {
    require(offset + length <= image_.size() && offset + length >= offset, "out of the image");
    return image_.data() + offset;
  }
  std::uint8_t u8(std::uint64_t offset) const { return std::to_integer<std::uint8_t>(*at(offset, 1)); }
  std::uint16_t u16(std::uint64_t offset) const { return load_le<std::uint16_t>(at(offset, 2)); }
  std::uint32_t u32(std::uint64_t offset) const { return load_le<std::uint32_t>(at(offset, 4)); }
  std::string text(std::uint64_t offset, std::uint64_t length) const {
    return length == 0 ? "" : std::string(reinterpret_cast<const char*>(at(offset, length)), length);
  }

  ErofsFile load(std::uint64_t nid, std::uint64_t parent_nid) {
    const std::uint64_t offset = nid * 32;
    require(offset % 4096 + 64 <= 4096, "an inode straddles a block");
    require((u16(offset) & 1) == 1, "extended inode");
    const unsigned layout = u16(offset) >> 1 & 7U;
    require(layout == 0 || layout == 2, "layout");
    ErofsFile file;
    file.nid = nid;
    file.mode = u16(offset + 4);
    file.size_bytes = load_le<std::uint64_t>(at(offset + 8, 8));
    file.location = u32(offset + 16);
    file.inode = u32(offset + 20);
    file.uid = u32(offset + 24);
    file.gid = u32(offset + 28);
    file.mtime_s = static_cast<std::int64_t>(load_le<std::uint64_t>(at(offset + 32, 8)));
    file.mtime_ns = u32(offset + 40);
    file.links = u32(offset + 44);
    const std::uint64_t count = u16(offset + 2);
    const std::uint64_t xattr_bytes = count == 0 ? 0 : 12 + (count - 1) * 4;
    load_xattrs(file, offset + 64, xattr_bytes);
    const unsigned type = file.mode & 0170000U;
    if (type != 0040000U && type != 0100000U && type != 0120000U) return file;
    std::uint64_t body = std::uint64_t{file.location} * 4096;
    if (layout == 2) {
      body = offset + 64 + xattr_bytes;
      require(body % 4096 + file.size_bytes <= 4096, "an inline tail straddles a block");
    }
    if (type == 0040000U) {
      load_directory(file, body, parent_nid);
    } else {
      file.body = text(body, file.size_bytes);
    }
    return file;
  }

  void load_xattrs(ErofsFile& file, std::uint64_t from, std::uint64_t length) const {
    static const std::map<unsigned, std::string> kPrefixes{{1, "user."},
                                                           {2, "system.posix_acl_access"},
                                                           {3, "system.posix_acl_default"},
                                                           {4, "trusted."},
                                                           {6, "security."}};
    if (length == 0) return;
    require(u8(from + 4) == 0, "shared xattrs");
    for (std::uint64_t entry = from + 12; entry < from + length;) {
      const std::uint64_t name_bytes = u8(entry);
      const std::uint64_t value_bytes = u16(entry + 2);
      const std::string name = kPrefixes.at(u8(entry + 1)) + text(entry + 4, name_bytes);
      require(file.xattrs.emplace(name, text(entry + 4 + name_bytes, value_bytes)).second, "an xattr twice");
      entry += (4 + name_bytes + value_bytes + 3) / 4 * 4;
      require(entry <= from + length, "an xattr is too long");
    }
  }

  void load_directory(ErofsFile& file, std::uint64_t body, std::uint64_t parent_nid) {
    for (std::uint64_t done = 0; done < file.size_bytes; done += 4096) {
      const std::uint64_t block = body + done;
      const std::uint64_t block_bytes = std::min<std::uint64_t>(4096, file.size_bytes - done);
      const std::uint64_t first_name = u16(block + 8);
      require(first_name >= 12 && first_name % 12 == 0 && first_name < block_bytes, "name offset");
      for (std::uint64_t i = 0; i < first_name / 12; ++i) {
        const std::uint64_t entry = block + i * 12;
        const std::uint64_t start = u16(entry + 8);
        std::uint64_t end = block_bytes;
        if (i + 1 < first_name / 12) end = u16(entry + 12 + 8);
        require(start < end && end <= block_bytes, "a name is out of its block");
        std::string name = text(block + start, end - start);
        name = name.substr(0, name.find('\0'));  // the last one is padded
        require(!name.empty() && name.size() <= 255, "name length");
        require(file.order.empty() || file.order.back() < name, "names are not in order");
        file.order.push_back(name);
        const std::uint64_t child_nid = load_le<std::uint64_t>(at(entry, 8));
        if (name == ".") require(child_nid == file.nid, ".");
        if (name == "..") require(child_nid == parent_nid, "..");
        if (name == "." || name == "..") continue;
        ErofsFile child = load(child_nid, file.nid);
        require(u8(entry + 10) == type_code(child.mode), "file type of an entry");
        file.children.emplace(name, std::move(child));
      }
    }
    require(file.order.size() == file.children.size() + 2, "an entry twice, or no . and ..");
  }

  static unsigned type_code(std::uint32_t mode) {
    static const std::map<unsigned, unsigned> kCodes{{0100000, 1}, {0040000, 2}, {0020000, 3}, {0060000, 4},
                                                     {0010000, 5}, {0140000, 6}, {0120000, 7}};
    return kCodes.at(mode & 0170000U);
  }

  std::span<const std::byte> image_;
};

}  // namespace bootseer::test
