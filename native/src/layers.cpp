// Applies the layers of an OCI image to a tree. Source: OCI image specification 1.1, layer.md ("Applying
// Changesets"); parents that are symbolic links are followed inside the root, as container engines do.

#include <archive.h>
#include <archive_entry.h>
#include <fcntl.h>
#include <locale.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <limits>
#include <memory>
#include <set>
#include <vector>

#include "bootseer/error.hpp"
#include "bootseer/transfer.hpp"
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

constexpr std::uint64_t kProgressBytes = 8U << 20;

// libarchive recodes the names of pax headers, which are UTF-8, for the locale of the process, and normalises
// them on the way. In the "C" locale it gives up and hands their bytes over, which is all we want.
class PlainLocale {
 public:
  PlainLocale() : plain_(::newlocale(LC_ALL_MASK, "C", nullptr)), before_(::uselocale(plain_)) {}
  PlainLocale(const PlainLocale&) = delete;
  PlainLocale& operator=(const PlainLocale&) = delete;
  ~PlainLocale() {
    ::uselocale(before_);
    ::freelocale(plain_);
  }

 private:
  locale_t plain_;
  locale_t before_;
};

class LayerApplier {
 public:
  LayerApplier(Node root, int spool, const ProgressCallback& progress, std::uint64_t total_bytes)
      : root_(std::move(root)), spool_(spool), progress_(progress), total_bytes_(total_bytes) {}

  void apply(const std::string& path, std::size_t layer) {
    layer_ = layer;
    path_ = path;
    linked_.clear();
    const std::unique_ptr<archive, decltype(&archive_read_free)> reader(archive_read_new(),
                                                                        archive_read_free);
    // Not all that libarchive knows: it runs other programs for some of them.
    archive_read_support_filter_gzip(reader.get());
    archive_read_support_filter_zstd(reader.get());
    archive_read_support_format_tar(reader.get());
    archive_read_support_format_empty(reader.get());
    if (archive_read_open_filename(reader.get(), path.c_str(), 1U << 20) != ARCHIVE_OK) bad(reader.get());
    for (;;) {
      archive_entry* entry = nullptr;
      const int result = archive_read_next_header(reader.get(), &entry);
      if (result == ARCHIVE_EOF) break;
      if (result < ARCHIVE_WARN) bad(reader.get());
      add(reader.get(), entry);
      report(reader.get());
    }
    done_bytes_ += static_cast<std::uint64_t>(archive_filter_bytes(reader.get(), -1));
  }

 private:
  void report(archive* reader) {
    const std::uint64_t done = done_bytes_ + static_cast<std::uint64_t>(archive_filter_bytes(reader, -1));
    if (!progress_ || done < reported_bytes_ + kProgressBytes) return;
    reported_bytes_ = done;
    progress_(done, total_bytes_);
  }

  [[noreturn]] void bad(archive* reader) const {
    const char* why = archive_error_string(reader);
    throw Error(Errc::integrity, path_ + ": " + (why != nullptr ? why : "not a layer"));
  }

  [[noreturn]] void bad_entry(const std::string& why) const {
    throw Error(Errc::integrity, path_ + ": " + why);
  }

  std::vector<std::string> entry_parts(const char* name) const {
    if (name == nullptr) bad_entry("an entry has no name");
    std::vector<std::string> parts = split(name);
    for (const std::string& part : parts) {
      if (part == "..") bad_entry("an entry leads out of the image");
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
        if (++symlinks > kMaxSymlinks) bad_entry("too many symbolic links");
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
      if (trail.size() > kMaxDepth) bad_entry("directories are nested too deeply");
    }
    return trail.back();
  }

  // Removes from a directory what lower layers put there; what this layer brought stays.
  void hide_lower(TreeNode& directory) {
    std::erase_if(directory.children,
                  [&](const auto& child) { return is_hidden(directory, child.first, *child.second); });
  }

  bool is_hidden(const TreeNode& parent, const std::string& name, TreeNode& child) {
    hide_lower(child);
    return child.layer < layer_ && child.children.empty() && !linked_.contains({&parent, name});
  }

  void add(archive* reader, archive_entry* entry) {
    const char* name = archive_entry_pathname(entry);
    if (name == nullptr) name = archive_entry_pathname_utf8(entry);
    std::vector<std::string> parts = entry_parts(name);
    if (parts.empty()) {
      if (archive_entry_filetype(entry) != S_IFDIR) bad_entry("the root is no directory");
      set_metadata(*root_, entry);
      return;
    }
    const std::string base = std::move(parts.back());
    parts.pop_back();
    const Node parent = directory(parts);
    if (base == kOpaque) {
      hide_lower(*parent);
      return;
    }
    if (base.starts_with(kWhiteout)) {
      const auto hidden = parent->children.find(base.substr(std::char_traits<char>::length(kWhiteout)));
      if (hidden != parent->children.end() && is_hidden(*parent, hidden->first, *hidden->second)) {
        parent->children.erase(hidden);
      }
      return;
    }
    if (const char* target = archive_entry_hardlink(entry); target != nullptr) {
      parent->children[base] = find(target);
      linked_.emplace(parent.get(), base);
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
      if (target == nullptr) bad_entry("a symbolic link has no target");
      node->target = target;
      node->size_bytes = node->target.size();
    }
    if (node->is_regular()) spool(reader, entry, *node);
    parent->children[base] = node;
  }

  Node find(const char* name) {
    std::vector<std::string> parts = entry_parts(name);
    if (parts.empty()) bad_entry("a hard link to the root");
    const std::string base = std::move(parts.back());
    parts.pop_back();
    const Node parent = directory(parts);
    const auto found = parent->children.find(base);
    if (found == parent->children.end() || found->second->is_dir()) {
      bad_entry(std::string("a hard link refers to ") + name + ", which is no file of the image");
    }
    return found->second;
  }

  void set_metadata(TreeNode& node, archive_entry* entry) const {
    const auto type = archive_entry_filetype(entry);
    if (type == 0) bad_entry("an entry has an unknown type");
    node.mode = static_cast<std::uint32_t>(type) | (archive_entry_perm(entry) & 07777U);
    node.uid = owner(archive_entry_uid(entry));
    node.gid = owner(archive_entry_gid(entry));
    node.mtime_s = archive_entry_mtime(entry);
    const long fraction_ns = archive_entry_mtime_nsec(entry);
    node.mtime_ns =
        fraction_ns >= 0 && fraction_ns < 1'000'000'000 ? static_cast<std::uint32_t>(fraction_ns) : 0;
    node.dev_major = static_cast<std::uint32_t>(archive_entry_rdevmajor(entry));
    node.dev_minor = static_cast<std::uint32_t>(archive_entry_rdevminor(entry));
    node.layer = layer_;
    node.xattrs.clear();
    archive_entry_xattr_reset(entry);
    const char* name = nullptr;
    const void* value = nullptr;
    std::size_t length = 0;
    while (archive_entry_xattr_next(entry, &name, &value, &length) == ARCHIVE_OK) {
      // What overlayfs notes in an upper directory means nothing in an image, and could redirect names there.
      if (name == nullptr || !keeps_xattr(name) || std::string_view(name).starts_with("trusted.overlay."))
        continue;
      node.xattrs[name].assign(static_cast<const char*>(value), length);
    }
  }

  std::uint32_t owner(la_int64_t id) const {
    if (id < 0 || id > std::numeric_limits<std::uint32_t>::max()) bad_entry("an owner is out of range");
    return static_cast<std::uint32_t>(id);
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
        bad_entry("a file is longer than its header says");
      }
      write(data, length, spooled_ + static_cast<std::uint64_t>(offset));
      report(reader);
    }
    spooled_ += node.size_bytes;
    // What a sparse file leaves out reads as zeros.
    if (::ftruncate(spool_, static_cast<off_t>(spooled_)) != 0) throw_errno("spool");
  }

  void write(const void* data, std::size_t length, std::uint64_t offset) const {
    const std::span bytes(static_cast<const std::byte*>(data), length);
    if (const int error = pwrite_all(spool_, bytes, offset); error != 0) throw_errno("spool", error);
  }

  Node root_;
  int spool_;
  const ProgressCallback& progress_;
  std::uint64_t total_bytes_;
  std::uint64_t done_bytes_ = 0;
  std::uint64_t reported_bytes_ = 0;
  std::uint64_t spooled_ = 0;
  std::size_t layer_ = 0;
  // Names that this layer made by hard links; their inodes may be of lower layers.
  std::set<std::pair<const TreeNode*, std::string>> linked_;
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

// A file without a name: gone when this process is, whatever happens.
UniqueFd open_spool(const std::string& directory) {
  UniqueFd fd(::open(directory.c_str(), O_RDWR | O_TMPFILE | O_CLOEXEC, 0600));
  if (fd || (errno != EOPNOTSUPP && errno != EISDIR)) return fd;
  std::string name = directory + "/.tmp-spool-XXXXXX";
  fd.reset(::mkostemp(name.data(), O_CLOEXEC));
  if (fd) ::unlink(name.c_str());
  return fd;
}

}  // namespace

Tree Tree::from_layers(const std::vector<std::string>& layers, const std::string& spool_dir,
                       const ProgressCallback& progress) {
  Tree tree;
  tree.spool_ = open_spool(spool_dir);
  if (!tree.spool_) throw_errno(spool_dir);
  std::uint64_t total_bytes = 0;
  for (const std::string& layer : layers) total_bytes += std::filesystem::file_size(layer);
  const PlainLocale locale;
  LayerApplier applier(tree.root_, tree.spool_.get(), progress, total_bytes);
  for (std::size_t i = 0; i < layers.size(); ++i) applier.apply(layers[i], i + 1);
  reset_links(*tree.root_);
  count_links(*tree.root_);
  return tree;
}

}  // namespace bootseer
