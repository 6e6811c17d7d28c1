#include "bootseer/tree.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <unordered_map>

#include "bootseer/error.hpp"

namespace bootseer {
namespace {

constexpr std::size_t kReadBytes = 1U << 20;

struct FileId {
  dev_t device;
  ino_t inode;
  bool operator==(const FileId&) const = default;
};
struct FileIdHash {
  std::size_t operator()(const FileId& id) const noexcept {
    return id.inode * 0x9E3779B97F4A7C15ULL ^ id.device;
  }
};
using HardLinks = std::unordered_map<FileId, std::shared_ptr<TreeNode>, FileIdHash>;

void read_xattrs(const std::string& path, TreeNode& node) {
  std::vector<char> names(4096);
  ssize_t n = ::llistxattr(path.c_str(), names.data(), names.size());
  if (n < 0 && errno == ERANGE) {
    names.resize(65536);
    n = ::llistxattr(path.c_str(), names.data(), names.size());
  }
  if (n < 0) {
    if (errno == ENOTSUP || errno == EPERM) return;
    throw_errno(path);
  }
  for (std::size_t at = 0; at < static_cast<std::size_t>(n);) {
    const std::string name(names.data() + at);
    at += name.size() + 1;
    if (!keeps_xattr(name)) continue;
    std::string value(65536, '\0');
    const ssize_t length = ::lgetxattr(path.c_str(), name.c_str(), value.data(), value.size());
    if (length < 0) throw_errno(std::string(path).append(": ").append(name));
    value.resize(static_cast<std::size_t>(length));
    node.xattrs[name] = std::move(value);
  }
}

std::shared_ptr<TreeNode> scan(const std::string& path, HardLinks& links);

void scan_children(const std::string& path, TreeNode& node, HardLinks& links) {
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir(path.c_str()), ::closedir);
  if (!directory) throw_errno(path);
  for (;;) {
    errno = 0;
    const dirent* entry = ::readdir(directory.get());
    if (entry == nullptr) {
      if (errno != 0) throw_errno(path);
      return;
    }
    const std::string name(entry->d_name);
    if (name == "." || name == "..") continue;
    node.children[name] = scan(std::string(path).append("/").append(name), links);
  }
}

std::shared_ptr<TreeNode> scan(const std::string& path, HardLinks& links) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) throw_errno(path);
  const bool may_be_linked = !S_ISDIR(status.st_mode) && status.st_nlink > 1;
  if (may_be_linked) {
    if (const auto known = links.find({status.st_dev, status.st_ino}); known != links.end()) {
      ++known->second->links;
      return known->second;
    }
  }
  auto node = std::make_shared<TreeNode>();
  node->mode = status.st_mode;
  node->uid = status.st_uid;
  node->gid = status.st_gid;
  node->mtime_s = status.st_mtim.tv_sec;
  node->mtime_ns = static_cast<std::uint32_t>(status.st_mtim.tv_nsec);
  node->links = 1;
  read_xattrs(path, *node);
  if (S_ISDIR(status.st_mode)) {
    scan_children(path, *node, links);
  } else if (S_ISREG(status.st_mode)) {
    node->size_bytes = static_cast<std::uint64_t>(status.st_size);
    node->path = path;
  } else if (S_ISLNK(status.st_mode)) {
    std::string target(4096, '\0');
    const ssize_t n = ::readlink(path.c_str(), target.data(), target.size());
    if (n < 0) throw_errno(path);
    target.resize(static_cast<std::size_t>(n));
    node->size_bytes = target.size();
    node->target = std::move(target);
  } else if (S_ISCHR(status.st_mode) || S_ISBLK(status.st_mode)) {
    node->dev_major = major(status.st_rdev);
    node->dev_minor = minor(status.st_rdev);
  }
  if (may_be_linked) links[{status.st_dev, status.st_ino}] = node;
  return node;
}

// What a file must not change while it is read.
bool is_unchanged(const TreeNode& node, int fd) {
  struct stat status {};
  return ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
         static_cast<std::uint64_t>(status.st_size) == node.size_bytes &&
         status.st_mtim.tv_sec == node.mtime_s &&
         static_cast<std::uint32_t>(status.st_mtim.tv_nsec) == node.mtime_ns;
}

}  // namespace

bool keeps_xattr(const std::string& name) {
  return name.starts_with("user.") || name.starts_with("trusted.") || name == "security.capability" ||
         name.starts_with("system.posix_acl_");
}

Tree::Tree() : root_(std::make_shared<TreeNode>()) {
  root_->mode = S_IFDIR | 0755;
  root_->links = 1;
}

Tree Tree::from_directory(const std::string& root) {
  HardLinks links;
  Tree tree;
  tree.root_ = scan(std::filesystem::canonical(root), links);
  if (!tree.root_->is_dir()) throw Error(Errc::usage, root + " is not a directory");
  return tree;
}

void Tree::read(const TreeNode& node, const std::function<void(std::span<const std::byte>)>& sink) const {
  const auto changed = [&] { throw Error(Errc::usage, node.path + " changed while it was read"); };
  UniqueFd opened;
  std::uint64_t offset = node.spool_offset;
  if (!node.path.empty()) {
    // O_NONBLOCK: a fifo may have taken the file's place.
    opened.reset(::open(node.path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (!opened) throw_errno(node.path);
    if (!is_unchanged(node, opened.get())) changed();
    offset = 0;
  }
  const int fd = opened ? opened.get() : spool_.get();
  std::vector<std::byte> buffer(
      static_cast<std::size_t>(std::min<std::uint64_t>(kReadBytes, node.size_bytes)));
  for (std::uint64_t left = node.size_bytes; left > 0;) {
    const auto wanted = static_cast<std::size_t>(std::min<std::uint64_t>(left, buffer.size()));
    const ssize_t n = ::pread(fd, buffer.data(), wanted, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_errno(node.path.empty() ? "spool" : node.path);
    if (n == 0) changed();
    sink(std::span(buffer).first(static_cast<std::size_t>(n)));
    offset += static_cast<std::uint64_t>(n);
    left -= static_cast<std::uint64_t>(n);
  }
  if (opened && !is_unchanged(node, opened.get())) changed();
}

}  // namespace bootseer
