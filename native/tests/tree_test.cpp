#include "bootseer/tree.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "bootseer/error.hpp"
#include "bootseer/fd.hpp"
#include "temp_dir.hpp"

namespace bootseer {
namespace {

using test::TempDir;

TEST(Tree, AnEmptyDirectory) {
  const TempDir directory;
  Tree tree = Tree::from_directory(directory.path());
  EXPECT_TRUE(tree.root().is_dir());
  EXPECT_TRUE(tree.root().children.empty());
}

TEST(Tree, WhatIsNoDirectoryIsRefused) {
  const TempDir directory;
  EXPECT_THROW(Tree::from_directory(directory.path("missing")), std::system_error);
  directory.write("file", "");
  try {
    Tree::from_directory(directory.path("file"));
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Errc::usage);
  }
}

TEST(Tree, ARootBehindASymbolicLinkIsWalked) {
  const TempDir directory;
  std::filesystem::create_directory(directory.path("real"));
  directory.write("real/file", "");
  std::filesystem::create_directory_symlink("real", directory.path("link"));
  EXPECT_EQ(Tree::from_directory(directory.path("link")).root().children.size(), 1U);
  EXPECT_EQ(Tree::from_directory(directory.path("link/")).root().children.size(), 1U);
}

TEST(Tree, LinksAreNotFollowed) {
  const TempDir directory;
  std::filesystem::create_directory_symlink("/", directory.path("root"));
  std::filesystem::create_symlink("missing", directory.path("dangling"));
  Tree tree = Tree::from_directory(directory.path());
  EXPECT_EQ(tree.root().children.at("root")->target, "/");
  EXPECT_TRUE(tree.root().children.at("root")->children.empty());
  EXPECT_EQ(tree.root().children.at("dangling")->target, "missing");
}

TEST(Tree, HardLinksOutsideOfTheTreeDoNotCount) {
  const TempDir directory;
  std::filesystem::create_directory(directory.path("tree"));
  directory.write("tree/one", "x");
  std::filesystem::create_hard_link(directory.path("tree/one"), directory.path("tree/two"));
  std::filesystem::create_hard_link(directory.path("tree/one"), directory.path("outside"));
  Tree tree = Tree::from_directory(directory.path("tree"));
  EXPECT_EQ(tree.root().children.at("one"), tree.root().children.at("two"));
  EXPECT_EQ(tree.root().children.at("one")->links, 2U);
}

TEST(Tree, SpecialFiles) {
  const TempDir directory;
  ASSERT_EQ(::mkfifo(directory.path("fifo").c_str(), 0640), 0);
  const UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  directory.path("socket").copy(address.sun_path, sizeof address.sun_path - 1);
  ASSERT_EQ(::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  const bool has_device = ::mknod(directory.path("device").c_str(), S_IFCHR | 0600, makedev(10, 300)) == 0;
  Tree tree = Tree::from_directory(directory.path());
  EXPECT_EQ(tree.root().children.at("fifo")->mode & S_IFMT, S_IFIFO);
  EXPECT_EQ(tree.root().children.at("socket")->mode & S_IFMT, S_IFSOCK);
  if (has_device) {
    EXPECT_EQ(tree.root().children.at("device")->dev_major, 10U);
    EXPECT_EQ(tree.root().children.at("device")->dev_minor, 300U);
  }
}

TEST(Tree, KeepsTheAttributesOfTheFileOnly) {
  const TempDir directory;
  const std::string path = directory.write("file", "");
  if (::setxattr(path.c_str(), "user.color", "blue", 4, 0) != 0) GTEST_SKIP() << "no user xattrs here";
  ASSERT_EQ(::setxattr(path.c_str(), "user.empty", "", 0, 0), 0);
  const bool is_root = ::setxattr(path.c_str(), "security.selinux", "label", 5, 0) == 0;
  Tree tree = Tree::from_directory(directory.path());
  const std::map<std::string, std::string> kept{{"user.color", "blue"}, {"user.empty", ""}};
  EXPECT_EQ(tree.root().children.at("file")->xattrs, kept) << is_root;
}

TEST(Tree, ManyAttributes) {
  const TempDir directory;
  const std::string path = directory.write("file", "");
  // Names that take more than the first buffer of 4096 bytes; a small file system refuses them at some point.
  std::size_t count = 0;
  for (; count < 60; ++count) {
    const std::string name = "user." + std::to_string(count) + std::string(200, 'n');
    if (::setxattr(path.c_str(), name.c_str(), "v", 1, 0) != 0) break;
  }
  if (count == 0) GTEST_SKIP() << "no user xattrs here";
  EXPECT_EQ(Tree::from_directory(directory.path()).root().children.at("file")->xattrs.size(), count);
}

TEST(Tree, ReadsFilesLargerThanItsBuffer) {
  const TempDir directory;
  const std::string content = test::noise((5U << 20) + 3, 8);
  directory.write("file", content);
  Tree tree = Tree::from_directory(directory.path());
  std::string read;
  tree.read(*tree.root().children.at("file"), [&](std::span<const std::byte> bytes) {
    read.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  });
  EXPECT_TRUE(read == content);
}

TEST(Tree, AFileReplacedByALinkIsNotFollowed) {
  const TempDir directory;
  directory.write("file", "content");
  Tree tree = Tree::from_directory(directory.path());
  std::filesystem::remove(directory.path("file"));
  std::filesystem::create_symlink("/etc/passwd", directory.path("file"));
  EXPECT_THROW(tree.read(*tree.root().children.at("file"), [](std::span<const std::byte>) {}),
               std::system_error);
}

TEST(Tree, DeepDirectories) {
  const TempDir directory;
  std::string path = directory.path();
  for (int depth = 0; depth < 300; ++depth) ASSERT_EQ(::mkdir((path += "/d").c_str(), 0755), 0);
  Tree tree = Tree::from_directory(directory.path());
  int found = 0;
  const TreeNode* node = &tree.root();
  for (; !node->children.empty(); ++found) node = node->children.begin()->second.get();
  EXPECT_EQ(found, 300);
}

}  // namespace
}  // namespace bootseer
