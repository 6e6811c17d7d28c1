// Applies the layers of an OCI image to a tree. Source: OCI image specification 1.1, layer.md ("Applying
// Changesets"); parents that are symbolic links are followed inside the root, as container engines do.

#include <archive.h>
#include <archive_entry.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <memory>
#include <vector>

#include "bootseer/error.hpp"
#include "bootseer/tree.hpp"

namespace bootseer {
namespace {

constexpr const char* kWhiteout = ".wh.";
constexpr const char* kOpaque = ".wh..wh..opq";
constexpr int kMaxSymlinks = 40;
constexpr std::size_t kMaxDepth = 1024;  // of directories; trees are walked recursively

using Node = std::shared_ptr<TreeNode>;

std::vector<std::string> split(const std::string& path) {
  std::vector<std::string> parts;
  for (std::size_t at = 0; at < path.size();) {
    std::size_t end = path.find('/', at);
    if (end == std::string::npos) end = path.size();
    const std::string part = path.substr(at, end - at);
    if (!part.empty() && part != ".") parts.push_back(part);
    at = end + 1;
  }
  return parts;
}

// Removes what lower layers put below `node`; true when nothing is left of it.
bool prune(const Node& node, std::size_t layer) {
  std::erase_if(node->children, [layer](const auto& child) { return prune(child.second, layer); });
  return node->layer < layer && node->children.empty();
}

class LayerApplier {
 public:
  LayerApplier(Node root, int spool) : root_(std::move(root)), spool_(spool) {}

  void apply(const std::string& path, std::size_t layer) {
    layer_ = layer;
    path_ = path;
    const std::unique_ptr<archive, decltype(&archive_read_free)> reader(archive_read_new(),
                                                                        archive_read_free);
    archive_read_support_filter_all(reader.get());
    archive_read_support_format_tar(reader.get());
    archive_read_support_format_empty(reader.get());
    if (archive_read_open_filename(reader.get(), path.c_str(), 1U << 20) != ARCHIVE_OK) bad(reader.get());
    for (;;) {
      archive_entry* entry = nullptr;
      const int result = archive_read_next_header(reader.get(), &entry);
      if (result == ARCHIVE_EOF) return;
      if (result < ARCHIVE_WARN) bad(reader.get());
      add(reader.get(), entry);
    }
  }

 private:
  [[noreturn]] void bad(archive* reader) const {
    const char* why = archive_error_string(reader);
    throw Error(Errc::integrity, path_ + ": " + (why != nullptr ? why : "not a layer"));
  }

  std::vector<std::string> entry_parts(const char* name) const {
    if (name == nullptr) throw Error(Errc::integrity, path_ + ": an entry has no name");
    std::vector<std::string> parts = split(name);
    for (const std::string& part : parts) {
      if (part == "..") throw Error(Errc::integrity, path_ + ": an entry leads out of the image");
    }
    return parts;
  }

  // The directory that `parts` names, made where it is missing.
  Node directory(const std::vector<std::string>& parts) {
    std::vector<Node> trail{root_};
    std::vector<std::string> todo(parts.rbegin(), parts.rend());
    int symlinks = 0;
    while (!todo.empty()) {
      const std::string part = std::move(todo.back());
      todo.pop_back();
      if (part == "..") {
        if (trail.size() > 1) trail.pop_back();
        continue;
      }
      Node& child = trail.back()->children[part];
      if (child && child->is_symlink()) {
        if (++symlinks > kMaxSymlinks) throw Error(Errc::integrity, path_ + ": too many symbolic links");
        if (child->target.starts_with('/')) trail.resize(1);
        const std::vector<std::string> target = split(child->target);
        todo.insert(todo.end(), target.rbegin(), target.rend());
        continue;
      }
      if (!child || !child->is_dir()) {
        child = std::make_shared<TreeNode>();
        child->mode = S_IFDIR | 0755;
        child->layer = layer_;
      }
      trail.push_back(child);
      if (trail.size() > kMaxDepth)
        throw Error(Errc::integrity, path_ + ": directories are nested too deeply");
    }
    return trail.back();
  }

  void add(archive* reader, archive_entry* entry) {
    const char* name = archive_entry_pathname(entry);
    if (name == nullptr) name = archive_entry_pathname_utf8(entry);
    std::vector<std::string> parts = entry_parts(name);
    if (parts.empty()) {
      set_metadata(*root_, entry);
      return;
    }
    const std::string base = std::move(parts.back());
    parts.pop_back();
    const Node parent = directory(parts);
    if (base == kOpaque) {
      std::erase_if(parent->children, [this](const auto& child) { return prune(child.second, layer_); });
      return;
    }
    if (base.starts_with(kWhiteout)) {
      const auto hidden = parent->children.find(base.substr(std::char_traits<char>::length(kWhiteout)));
      if (hidden != parent->children.end() && prune(hidden->second, layer_)) parent->children.erase(hidden);
      return;
    }
    if (const char* target = archive_entry_hardlink(entry); target != nullptr) {
      parent->children[base] = find(target);
      return;
    }
    Node node;
    const bool is_directory = archive_entry_filetype(entry) == S_IFDIR;
    if (const auto old = parent->children.find(base);
        old != parent->children.end() && old->second->is_dir() && is_directory) {
      node = old->second;  // children of lower layers stay
    } else {
      node = std::make_shared<TreeNode>();
    }
    set_metadata(*node, entry);
    if (node->is_symlink()) {
      const char* target = archive_entry_symlink(entry);
      if (target == nullptr) throw Error(Errc::integrity, path_ + ": a symbolic link has no target");
      node->target = target;
      node->size_bytes = node->target.size();
    }
    if (node->is_regular()) spool(reader, entry, *node);
    parent->children[base] = node;
  }

  Node find(const char* name) {
    std::vector<std::string> parts = entry_parts(name);
    if (parts.empty()) throw Error(Errc::integrity, path_ + ": a hard link to the root");
    const std::string base = std::move(parts.back());
    parts.pop_back();
    const Node parent = directory(parts);
    const auto found = parent->children.find(base);
    if (found == parent->children.end() || found->second->is_dir()) {
      throw Error(Errc::integrity,
                  path_ + ": a hard link refers to " + name + ", which is no file of the image");
    }
    return found->second;
  }

  void set_metadata(TreeNode& node, archive_entry* entry) const {
    const auto type = archive_entry_filetype(entry);
    if (type == 0) throw Error(Errc::integrity, path_ + ": an entry has an unknown type");
    node.mode = static_cast<std::uint32_t>(type) | (archive_entry_perm(entry) & 07777U);
    node.uid = static_cast<std::uint32_t>(archive_entry_uid(entry));
    node.gid = static_cast<std::uint32_t>(archive_entry_gid(entry));
    node.mtime_s = archive_entry_mtime(entry);
    node.mtime_ns = static_cast<std::uint32_t>(archive_entry_mtime_nsec(entry));
    node.dev_major = static_cast<std::uint32_t>(archive_entry_rdevmajor(entry));
    node.dev_minor = static_cast<std::uint32_t>(archive_entry_rdevminor(entry));
    node.layer = layer_;
    node.xattrs.clear();
    archive_entry_xattr_reset(entry);
    const char* name = nullptr;
    const void* value = nullptr;
    std::size_t length = 0;
    while (archive_entry_xattr_next(entry, &name, &value, &length) == ARCHIVE_OK) {
      if (name != nullptr) node.xattrs[name].assign(static_cast<const char*>(value), length);
    }
  }

  void spool(archive* reader, archive_entry* entry, TreeNode& node) {
    node.spool_offset = spooled_;
    node.size_bytes = static_cast<std::uint64_t>(archive_entry_size(entry));
    for (;;) {
      const void* data = nullptr;
      std::size_t length = 0;
      la_int64_t offset = 0;
      const int result = archive_read_data_block(reader, &data, &length, &offset);
      if (result == ARCHIVE_EOF) break;
      if (result < ARCHIVE_WARN) bad(reader);
      if (offset < 0 || static_cast<std::uint64_t>(offset) + length > node.size_bytes) {
        throw Error(Errc::integrity, path_ + ": a file is longer than its header says");
      }
      write(data, length, spooled_ + static_cast<std::uint64_t>(offset));
    }
    spooled_ += node.size_bytes;
    // What a sparse file leaves out reads as zeros.
    if (::ftruncate(spool_, static_cast<off_t>(spooled_)) != 0) throw_errno("spool");
  }

  void write(const void* data, std::size_t length, std::uint64_t offset) const {
    const char* at = static_cast<const char*>(data);
    while (length > 0) {
      const ssize_t n = ::pwrite(spool_, at, length, static_cast<off_t>(offset));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) throw_errno("spool");
      at += n;
      offset += static_cast<std::uint64_t>(n);
      length -= static_cast<std::size_t>(n);
    }
  }

  Node root_;
  int spool_;
  std::uint64_t spooled_ = 0;
  std::size_t layer_ = 0;
  std::string path_;
};

void reset_links(TreeNode& node) {
  node.links = 0;
  for (const auto& [name, child] : node.children) reset_links(*child);
}

void count_links(TreeNode& node) {
  for (const auto& [name, child] : node.children) {
    ++child->links;
    count_links(*child);
  }
}

}  // namespace

Tree Tree::from_layers(const std::vector<std::string>& layers, const std::string& spool_dir) {
  Tree tree;
  tree.spool_.reset(::open(spool_dir.c_str(), O_RDWR | O_TMPFILE | O_CLOEXEC, 0600));
  if (!tree.spool_) throw_errno(spool_dir);
  LayerApplier applier(tree.root_, tree.spool_.get());
  for (std::size_t i = 0; i < layers.size(); ++i) applier.apply(layers[i], i + 1);
  reset_links(*tree.root_);
  count_links(*tree.root_);
  return tree;
}

}  // namespace bootseer
