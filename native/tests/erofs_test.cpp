#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <limits>
#include <memory>
#include <random>
#include <set>

#include "bootseer/erofs_writer.hpp"
#include "bootseer/error.hpp"
#include "erofs_reader.hpp"
#include "temp_dir.hpp"

namespace bootseer {
namespace {

using test::ErofsFile;
using test::ErofsReader;
using test::TempDir;

std::shared_ptr<TreeNode> make_node(std::uint32_t mode, std::uint32_t links = 1) {
  auto node = std::make_shared<TreeNode>();
  node->mode = mode;
  node->links = links;
  return node;
}

class Erofs : public ::testing::Test {
 protected:
  // Writes the tree, reads it back, and holds the numbers of the result against each other.
  ErofsFile write(Tree& tree) {
    result = write_erofs(tree, directory.path("image"), {});
    bytes = test::read_bytes(directory.path("image"));
    EXPECT_EQ(bytes.size(), result.image_bytes);
    EXPECT_LE(result.meta_bytes, result.image_bytes);
    EXPECT_EQ(result.meta_bytes % 4096, 0U);
    EXPECT_TRUE(std::is_sorted(result.extents.begin(), result.extents.end()));
    for (const std::uint64_t extent : result.extents) EXPECT_GE(extent, result.meta_bytes);
    ErofsReader reader(bytes);
    EXPECT_EQ(reader.inodes, result.files);
    return std::move(reader.root);
  }

  std::shared_ptr<TreeNode> file(const std::string& content) {
    auto node = make_node(S_IFREG | 0644);
    node->path = directory.write("content" + std::to_string(++files_), content);
    node->size_bytes = content.size();
    struct stat status {};
    EXPECT_EQ(::stat(node->path.c_str(), &status), 0);
    node->mtime_s = status.st_mtim.tv_sec;
    node->mtime_ns = static_cast<std::uint32_t>(status.st_mtim.tv_nsec);
    return node;
  }

  TempDir directory;
  ErofsImage result;
  std::vector<std::byte> bytes;

 private:
  int files_ = 0;
};

void expect_same(const TreeNode& expected, const ErofsFile& actual, const std::string& where) {
  SCOPED_TRACE(where);
  EXPECT_EQ(actual.mode, expected.mode);
  EXPECT_EQ(actual.uid, expected.uid);
  EXPECT_EQ(actual.gid, expected.gid);
  EXPECT_EQ(actual.mtime_s, expected.mtime_s);
  EXPECT_EQ(actual.mtime_ns, expected.mtime_ns);
  EXPECT_EQ(actual.xattrs, expected.xattrs);
  if (expected.is_symlink()) {
    EXPECT_EQ(actual.body, expected.target);
  }
  if (expected.is_regular()) {
    EXPECT_EQ(actual.size_bytes, expected.size_bytes);
  }
  if (!expected.is_dir()) {
    EXPECT_EQ(actual.links, expected.links);
  }
  ASSERT_EQ(actual.children.size(), expected.children.size());
  std::uint32_t subdirectories = 0;
  for (const auto& [name, child] : expected.children) {
    subdirectories += child->is_dir() ? 1 : 0;
    ASSERT_TRUE(actual.children.contains(name)) << name;
    expect_same(*child, actual.children.at(name), where + "/" + name);
  }
  if (expected.is_dir()) {
    EXPECT_EQ(actual.links, 2 + subdirectories);
  }
}

TEST_F(Erofs, AnEmptyTree) {
  Tree tree;
  const ErofsFile root = write(tree);
  EXPECT_TRUE(root.children.empty());
  EXPECT_EQ(root.links, 2U);
  EXPECT_EQ(result.image_bytes, 4096U);
  EXPECT_TRUE(result.extents.empty());
}

TEST_F(Erofs, ADirectoryOfTheHostComesBack) {
  const std::string root = directory.path("root");
  std::filesystem::create_directories(root + "/a/b/c");
  std::filesystem::create_directory(root + "/empty");
  const std::string large = test::noise(3 * 4096 + 17, 1);
  directory.write("root/a/large", large);
  directory.write("root/a/nothing", "");
  directory.write("root/a/b/page", std::string(4096, 'p'));
  std::filesystem::create_symlink("../a/large", root + "/empty/link");
  std::filesystem::create_hard_link(root + "/a/large", root + "/a/b/c/same");
  ASSERT_EQ(::chmod((root + "/a/large").c_str(), 04751), 0);
  ASSERT_EQ(::chmod((root + "/empty").c_str(), 01777), 0);
  const timespec times[2] = {{1, 2}, {1700000000, 123456789}};
  ASSERT_EQ(::utimensat(AT_FDCWD, (root + "/a/large").c_str(), times, 0), 0);

  Tree tree = Tree::from_directory(root);
  const ErofsFile image = write(tree);
  expect_same(tree.root(), image, "");
  EXPECT_EQ(image.at("a/large").body, large);
  EXPECT_EQ(image.at("a/large").mode, S_IFREG | 04751U);
  EXPECT_EQ(image.at("a/large").mtime_s, 1700000000);
  EXPECT_EQ(image.at("a/large").mtime_ns, 123456789U);
  EXPECT_EQ(image.at("a/b/page").body, std::string(4096, 'p'));
  EXPECT_EQ(image.at("empty/link").body, "../a/large");
  EXPECT_EQ(image.at("a/large").links, 2U);
  EXPECT_EQ(image.at("a/large").nid, image.at("a/b/c/same").nid);
  EXPECT_EQ(result.files, 9U);  // the hard link is no inode of its own
  EXPECT_EQ(result.extents.size(), 2U);
}

TEST_F(Erofs, EqualTreesGiveEqualBytes) {
  std::vector<std::byte> first;
  for (const bool backwards : {false, true}) {
    const std::string root = directory.path(backwards ? "backwards" : "forwards");
    std::filesystem::create_directory(root);
    for (int i = 0; i < 300; ++i) {
      const int number = backwards ? 299 - i : i;  // another order on disk
      const std::string name = root + "/" + std::to_string(number);
      std::ofstream(name) << test::noise(static_cast<std::size_t>(number) * 40, 3);
      const timespec times[2] = {{5, 5}, {number, 0}};
      ASSERT_EQ(::utimensat(AT_FDCWD, name.c_str(), times, 0), 0);
    }
    const timespec times[2] = {{5, 5}, {6, 7}};
    ASSERT_EQ(::utimensat(AT_FDCWD, root.c_str(), times, 0), 0);
    Tree tree = Tree::from_directory(root);
    write(tree);
    if (!backwards) first = bytes;
  }
  EXPECT_EQ(first, bytes);
}

TEST_F(Erofs, ADirectoryOfManyBlocks) {
  Tree tree;
  std::mt19937 random(7);
  std::set<std::string> names;
  while (names.size() < 10000) {
    std::string name(1 + random() % 60, 'n');
    for (char& letter : name) letter = static_cast<char>('!' + random() % 90);
    if (name.find('/') == std::string::npos && name != "." && name != "..") names.insert(name);
  }
  for (const std::string& name : names) tree.root().children[name] = make_node(S_IFREG | 0600);
  const ErofsFile root = write(tree);
  EXPECT_GT(root.size_bytes, 50U * 4096);
  ASSERT_EQ(root.children.size(), 10000U);
  for (const std::string& name : names) EXPECT_TRUE(root.children.contains(name)) << name;
}

// Directory sizes around one block: inline behind the inode, in a block of its own, exactly full, one more.
TEST_F(Erofs, DirectoriesAroundABlock) {
  for (std::size_t entries = 230; entries <= 262; ++entries) {
    Tree tree;
    for (std::size_t i = 0; i < entries; ++i) {
      tree.root().children[std::to_string(1000 + i)] = make_node(S_IFREG | 0600);
    }
    const ErofsFile root = write(tree);
    EXPECT_EQ(root.children.size(), entries);
  }
}

TEST_F(Erofs, NamesMayHoldEveryByte) {
  Tree tree;
  for (int byte = 1; byte < 256; ++byte) {
    if (byte == '/') continue;
    const char letter = static_cast<char>(byte);
    if (letter != '.') tree.root().children[std::string(1, letter)] = make_node(S_IFREG | 0600);
    tree.root().children[std::string("..") + letter] = make_node(S_IFREG | 0600);
    tree.root().children[std::string(255, letter)] = make_node(S_IFREG | 0600);
  }
  const ErofsFile root = write(tree);
  EXPECT_EQ(root.children.size(), 253U + 254 + 254);
  expect_same(tree.root(), root, "");
}

TEST_F(Erofs, ANameThatIsTooLongIsRefused) {
  Tree tree;
  tree.root().children[std::string(256, 'x')] = make_node(S_IFREG | 0600);
  try {
    write(tree);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Errc::usage);
  }
}

TEST_F(Erofs, SymbolicLinksOfEveryLength) {
  Tree tree;
  for (const std::size_t length : {1U, 31U, 3900U, 4000U, 4031U, 4032U, 4033U, 4095U}) {
    auto link = make_node(S_IFLNK | 0777);
    link->target = test::noise(length, static_cast<unsigned>(length));
    for (char& letter : link->target) letter = static_cast<char>('a' + (letter & 15));
    link->size_bytes = length;
    tree.root().children[std::to_string(length)] = link;
  }
  expect_same(tree.root(), write(tree), "");
}

TEST_F(Erofs, ExtendedAttributes) {
  Tree tree;
  for (const std::size_t length : {0U, 1U, 3U, 4U, 100U, 3960U, 4096U, 20000U, 65535U}) {
    auto node = make_node(length % 2 == 0 ? S_IFREG | 0600 : S_IFDIR | 0700);
    node->xattrs["user.value"] = test::noise(length, 9);
    node->xattrs["user." + std::string(250, 'n')] = "long name";
    node->xattrs["trusted.t"] = std::string("\0\xff", 2);
    node->xattrs["security.capability"] = std::string(20, '\1');
    node->xattrs["system.posix_acl_access"] = std::string(28, '\2');
    if (node->is_dir()) node->children["child"] = make_node(S_IFREG | 0600);
    tree.root().children[std::to_string(length)] = node;
  }
  tree.root().xattrs["user.root"] = "r";
  expect_same(tree.root(), write(tree), "");
}

TEST_F(Erofs, AttributesThatErofsHasNoPlaceForAreLeftOut) {
  Tree tree;
  auto node = make_node(S_IFREG | 0600);
  node->xattrs["btrfs.compression"] = "zstd";
  node->xattrs["user.kept"] = "k";
  tree.root().children["f"] = node;
  const std::map<std::string, std::string> kept{{"user.kept", "k"}};
  EXPECT_EQ(write(tree).at("f").xattrs, kept);
}

TEST_F(Erofs, AnAttributeThatIsTooLongIsRefused) {
  Tree tree;
  auto node = make_node(S_IFREG | 0600);
  node->xattrs["user.large"] = std::string(65536, 'x');
  tree.root().children["f"] = node;
  EXPECT_THROW(write(tree), Error);
}

TEST_F(Erofs, TooManyAttributesAreRefused) {
  Tree tree;
  auto node = make_node(S_IFREG | 0600);
  for (int i = 0; i < 5; ++i) node->xattrs["user." + std::to_string(i)] = std::string(65535, 'x');
  tree.root().children["f"] = node;
  EXPECT_THROW(write(tree), Error);
}

TEST_F(Erofs, SpecialFilesOwnersAndTimes) {
  Tree tree;
  const auto add = [&](const std::string& name, std::uint32_t mode) {
    tree.root().children[name] = make_node(mode);
    return tree.root().children[name];
  };
  auto device = add("char", S_IFCHR | 0666);
  device->dev_major = 0xabc;
  device->dev_minor = 0x12345;
  auto block = add("block", S_IFBLK | 0660);
  block->dev_major = 8;
  block->dev_minor = 17;
  add("fifo", S_IFIFO | 0600);
  add("socket", S_IFSOCK | 0600);
  auto owned = add("owned", S_IFREG | 07777);
  owned->uid = std::numeric_limits<std::uint32_t>::max() - 1;
  owned->gid = 70000;
  owned->mtime_s = -5;
  owned->mtime_ns = 999999999;
  const ErofsFile root = write(tree);
  expect_same(tree.root(), root, "");
  EXPECT_EQ(root.at("char").location, (0x12345U & 0xff) | 0xabcU << 8 | (0x12345U & ~0xffU) << 12);
  EXPECT_EQ(root.at("block").location, 0x811U);
}

TEST_F(Erofs, HardLinksShareAnInode) {
  Tree tree;
  auto shared = file("shared");
  shared->links = 3;
  tree.root().children["one"] = shared;
  tree.root().children["two"] = shared;
  tree.root().children["directory"] = make_node(S_IFDIR | 0755);
  tree.root().children["directory"]->children["three"] = shared;
  const ErofsFile root = write(tree);
  EXPECT_EQ(result.files, 3U);
  EXPECT_EQ(root.at("one").nid, root.at("two").nid);
  EXPECT_EQ(root.at("one").nid, root.at("directory/three").nid);
  EXPECT_EQ(root.at("one").links, 3U);
  EXPECT_EQ(root.at("directory/three").body, "shared");
}

TEST_F(Erofs, InodeNumbersAreDistinct) {
  Tree tree;
  for (int i = 0; i < 500; ++i) tree.root().children[std::to_string(i)] = make_node(S_IFREG | 0600);
  const ErofsFile root = write(tree);
  std::set<std::uint32_t> numbers{root.inode};
  for (const auto& [name, child] : root.children) EXPECT_TRUE(numbers.insert(child.inode).second);
}

// Random trees whose inodes, attributes and bodies fall anywhere relative to block ends.
TEST_F(Erofs, RandomTreesComeBack) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    Tree tree;
    std::vector<TreeNode*> directories{&tree.root()};
    for (int i = 0; i < 200; ++i) {
      TreeNode& parent = *directories[random() % directories.size()];
      const std::string name = test::noise(1, static_cast<unsigned>(random())) + std::to_string(random());
      if (name[0] == '/' || name[0] == '\0') continue;
      std::shared_ptr<TreeNode> node;
      switch (random() % 3) {
        case 0:
          node = make_node(S_IFDIR | 0755);
          directories.push_back(node.get());
          break;
        case 1:
          node = make_node(S_IFLNK | 0777);
          node->target = std::string(1 + random() % 4095, 'l');
          node->size_bytes = node->target.size();
          break;
        default:
          node = make_node(S_IFREG | 0644);
      }
      node->uid = static_cast<std::uint32_t>(random());
      for (unsigned x = random() % 4; x > 0; --x) {
        node->xattrs["user." + std::to_string(x)] = test::noise(random() % (x == 1 ? 5000 : 50), x);
      }
      parent.children[name] = node;
    }
    expect_same(tree.root(), write(tree), "seed " + std::to_string(seed));
  }
}

TEST_F(Erofs, AFileThatBecameShorterIsTheUsersMistake) {
  Tree tree;
  tree.root().children["f"] = file("0123456789");
  tree.root().children["f"]->size_bytes = 11;
  try {
    write(tree);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Errc::usage);
  }
}

TEST_F(Erofs, AFileThatGrewIsRefused) {
  Tree tree;
  tree.root().children["f"] = file("0123456789");
  tree.root().children["f"]->size_bytes = 4;
  EXPECT_THROW(write(tree), Error);
}

TEST_F(Erofs, ProgressEndsAtTheWholeImage) {
  Tree tree;
  tree.root().children["f"] = file(test::noise(100000, 4));
  std::uint64_t last = 0;
  const ErofsImage image =
      write_erofs(tree, directory.path("image"), [&](std::uint64_t done, std::uint64_t total) {
        EXPECT_GE(done, last);
        EXPECT_LE(done, total);
        last = done;
      });
  EXPECT_EQ(last, image.image_bytes);
}

TEST_F(Erofs, AnOutputThatCannotBeWrittenSaysWhy) {
  Tree tree;
  try {
    write_erofs(tree, directory.path("missing/image"), {});
    FAIL() << "accepted";
  } catch (const std::system_error& error) {
    EXPECT_EQ(error.code().value(), ENOENT);
  }
}

}  // namespace
}  // namespace bootseer
