#include <gtest/gtest.h>
#include <sys/stat.h>
#include <zstd.h>

#include <clocale>
#include <functional>

#include "bootseer/error.hpp"
#include "bootseer/tree.hpp"
#include "refusal.hpp"
#include "tar_builder.hpp"
#include "temp_dir.hpp"

namespace bootseer {
namespace {

using test::TarBuilder;
using test::TempDir;

class Layers : public ::testing::Test {
 protected:
  Tree apply(const std::vector<std::string>& tars) {
    std::vector<std::string> paths;
    for (std::size_t i = 0; i < tars.size(); ++i) {
      paths.push_back(directory.write("layer" + std::to_string(i), tars[i]));
    }
    return Tree::from_layers(paths, directory.path());
  }

  TempDir directory;
};

// All paths of a tree, a directory with a slash at its end.
void list(const TreeNode& node, const std::string& where, std::vector<std::string>& found) {
  for (const auto& [name, child] : node.children) {
    found.push_back(where + name + (child->is_dir() ? "/" : ""));
    list(*child, where + name + "/", found);
  }
}

std::vector<std::string> paths(Tree& tree) {
  std::vector<std::string> found;
  list(tree.root(), "", found);
  return found;
}

const TreeNode& at(Tree& tree, const std::string& path) {
  const TreeNode* node = &tree.root();
  for (std::size_t from = 0; from < path.size();) {
    const std::size_t end = std::min(path.find('/', from), path.size());
    node = node->children.at(path.substr(from, end - from)).get();
    from = end + 1;
  }
  return *node;
}

std::string content(Tree& tree, const std::string& path) {
  std::string text;
  tree.read(at(tree, path), [&](std::span<const std::byte> bytes) {
    text.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  });
  return text;
}

using Paths = std::vector<std::string>;

TEST_F(Layers, MetadataAndContents) {
  TarBuilder tar;
  tar.add({.name = "./", .type = '5', .mode = 0711, .uid = 3});
  tar.add({.name = "./etc/", .type = '5', .mode = 01750, .uid = 10, .gid = 20, .mtime_s = 77});
  tar.add({.name = "./etc/file", .content = "text", .mode = 04755, .uid = 1, .gid = 2, .mtime_s = 99});
  tar.add({.name = "etc/link", .type = '2', .link = "../x y"});
  tar.add({.name = "dev/char", .type = '3', .mode = 0666, .dev_major = 1, .dev_minor = 3});
  tar.add({.name = "dev/block", .type = '4', .mode = 0660, .dev_major = 8, .dev_minor = 1});
  tar.add({.name = "dev/fifo", .type = '6', .mode = 0600});
  tar.add({.name = "x",
           .content = "named",
           .pax = {{"path", "long/" + std::string(200, 'n')},
                   {"mtime", "1700000000.123456789"},
                   {"uid", "3000000000"},
                   {"SCHILY.xattr.user.color", "blue"},
                   {"SCHILY.xattr.security.capability", std::string("\1\0\0\2\0\20\0\0", 8)}}});
  Tree tree = apply({tar.finish()});
  EXPECT_EQ(tree.root().mode, S_IFDIR | 0711U);
  EXPECT_EQ(tree.root().uid, 3U);
  EXPECT_EQ(at(tree, "etc").mode, S_IFDIR | 01750U);
  EXPECT_EQ(at(tree, "etc").mtime_s, 77);
  const TreeNode& file = at(tree, "etc/file");
  EXPECT_EQ(file.mode, S_IFREG | 04755U);
  EXPECT_EQ(file.uid, 1U);
  EXPECT_EQ(file.gid, 2U);
  EXPECT_EQ(file.mtime_s, 99);
  EXPECT_EQ(content(tree, "etc/file"), "text");
  EXPECT_EQ(at(tree, "etc/link").target, "../x y");
  EXPECT_EQ(at(tree, "dev").mode, S_IFDIR | 0755U);  // not in the tar
  EXPECT_EQ(at(tree, "dev/char").mode, S_IFCHR | 0666U);
  EXPECT_EQ(at(tree, "dev/char").dev_minor, 3U);
  EXPECT_EQ(at(tree, "dev/block").dev_major, 8U);
  EXPECT_EQ(at(tree, "dev/fifo").mode, S_IFIFO | 0600U);
  const TreeNode& named = at(tree, "long/" + std::string(200, 'n'));
  EXPECT_EQ(named.mtime_s, 1700000000);
  EXPECT_EQ(named.mtime_ns, 123456789U);
  EXPECT_EQ(named.uid, 3000000000U);
  EXPECT_EQ(named.xattrs.at("user.color"), "blue");
  EXPECT_EQ(named.xattrs.at("security.capability"), std::string("\1\0\0\2\0\20\0\0", 8));
}

TEST_F(Layers, UpperFilesReplaceLowerOnes) {
  Tree tree = apply(
      {TarBuilder().file("a", "old").file("b", "kept").finish(), TarBuilder().file("a", "new").finish()});
  EXPECT_EQ(content(tree, "a"), "new");
  EXPECT_EQ(content(tree, "b"), "kept");
}

TEST_F(Layers, UpperDirectoriesMerge) {
  Tree tree =
      apply({TarBuilder().directory("d").file("d/lower", "").finish(),
             TarBuilder().add({.name = "d", .type = '5', .mode = 0700}).file("d/upper", "").finish()});
  EXPECT_EQ(paths(tree), (Paths{"d/", "d/lower", "d/upper"}));
  EXPECT_EQ(at(tree, "d").mode, S_IFDIR | 0700U);
}

TEST_F(Layers, FilesReplaceDirectoriesAndTheOtherWayRound) {
  Tree tree = apply({TarBuilder().file("d/child", "").file("f", "").symlink("s", "d").finish(),
                     TarBuilder().file("d", "now a file").directory("f").directory("s").finish()});
  EXPECT_EQ(paths(tree), (Paths{"d", "f/", "s/"}));
}

TEST_F(Layers, WhiteoutsHideLowerLayersOnly) {
  const std::string lower = TarBuilder().file("d/one", "").file("d/two", "").file("gone/x/y", "").finish();
  Tree tree =
      apply({lower, TarBuilder().file("d/.wh.one", "").file(".wh.gone", "").file(".wh.never", "").finish()});
  EXPECT_EQ(paths(tree), (Paths{"d/", "d/two"}));

  // A directory that the same layer makes anew stays, whatever comes first in the tar.
  for (const bool whiteout_first : {false, true}) {
    TarBuilder upper;
    if (whiteout_first) upper.file(".wh.d", "");
    upper.directory("d").file("d/new", "n");
    if (!whiteout_first) upper.file(".wh.d", "");
    Tree again = apply({lower, upper.finish()});
    EXPECT_EQ(paths(again), (Paths{"d/", "d/new", "gone/", "gone/x/", "gone/x/y"})) << whiteout_first;
  }
}

TEST_F(Layers, AWhiteoutIsUndoneByALaterLayer) {
  Tree tree = apply({TarBuilder().file("f", "1").finish(), TarBuilder().file(".wh.f", "").finish(),
                     TarBuilder().file("f", "3").finish()});
  EXPECT_EQ(content(tree, "f"), "3");
}

TEST_F(Layers, OpaqueDirectoriesHideLowerLayersOnly) {
  const std::string lower = TarBuilder().file("d/one", "").file("d/sub/two", "").file("e", "").finish();
  for (const bool mark_first : {false, true}) {
    TarBuilder upper;
    upper.directory("d");
    if (mark_first) upper.file("d/.wh..wh..opq", "");
    upper.file("d/new", "").file("d/sub/three", "");
    if (!mark_first) upper.file("d/.wh..wh..opq", "");
    Tree tree = apply({lower, upper.finish()});
    EXPECT_EQ(paths(tree), (Paths{"d/", "d/new", "d/sub/", "d/sub/three", "e"})) << mark_first;
  }
}

TEST_F(Layers, HardLinksAcrossLayers) {
  Tree tree =
      apply({TarBuilder().file("a", "shared").hardlink("b", "a").finish(),
             TarBuilder().hardlink("d/c", "./b").finish(), TarBuilder().file("a", "changed").finish()});
  EXPECT_EQ(content(tree, "a"), "changed");
  EXPECT_EQ(at(tree, "a").links, 1U);
  EXPECT_EQ(&at(tree, "b"), &at(tree, "d/c"));
  EXPECT_EQ(at(tree, "b").links, 2U);
  EXPECT_EQ(content(tree, "b"), "shared");
}

// The name belongs to the layer that made it, even when the inode is older.
TEST_F(Layers, HardLinksToLowerFilesSurviveWhiteoutsOfTheirOwnLayer) {
  const std::string lower = TarBuilder().file("d/old", "content").finish();
  Tree opaque = apply({lower, TarBuilder().hardlink("d/new", "d/old").file("d/.wh..wh..opq", "").finish()});
  EXPECT_EQ(paths(opaque), (Paths{"d/", "d/new"}));
  EXPECT_EQ(content(opaque, "d/new"), "content");
  EXPECT_EQ(at(opaque, "d/new").links, 1U);

  Tree removed = apply({lower, TarBuilder().hardlink("d/new", "d/old").file(".wh.d", "").finish()});
  EXPECT_EQ(paths(removed), (Paths{"d/", "d/new"}));

  // For a later layer it is a lower name like all others.
  Tree later = apply(
      {lower, TarBuilder().hardlink("d/new", "d/old").finish(), TarBuilder().file(".wh.d", "").finish()});
  EXPECT_EQ(paths(later), Paths{});
}

TEST_F(Layers, AHardLinkReplacesWhatWasThere) {
  Tree tree = apply({TarBuilder().file("a", "1").file("d/x", "").finish(),
                     TarBuilder().hardlink("d", "a").hardlink("a", "a").finish()});
  EXPECT_EQ(paths(tree), (Paths{"a", "d"}));
  EXPECT_EQ(at(tree, "a").links, 2U);
}

TEST_F(Layers, ParentsThatAreSymbolicLinksAreFollowed) {
  Tree tree =
      apply({TarBuilder().directory("usr/lib").symlink("lib", "usr/lib").symlink("abs", "/usr/lib").finish(),
             TarBuilder().file("lib/one", "1").file("abs/two", "2").finish()});
  EXPECT_EQ(paths(tree), (Paths{"abs", "lib", "usr/", "usr/lib/", "usr/lib/one", "usr/lib/two"}));
}

TEST_F(Layers, SymbolicLinksNeverLeadOutOfTheRoot) {
  Tree tree = apply({TarBuilder().symlink("out", "../../../../etc").file("out/passwd", "mine").finish()});
  EXPECT_EQ(paths(tree), (Paths{"etc/", "etc/passwd", "out"}));
  EXPECT_EQ(content(tree, "etc/passwd"), "mine");
}

TEST_F(Layers, ALoopOfSymbolicLinksIsRefused) {
  const std::string tar = TarBuilder().symlink("a", "b").symlink("b", "a").file("a/f", "").finish();
  EXPECT_NE(test::refusal([&] { apply({tar}); }).find("symbolic links"), std::string::npos);
}

TEST_F(Layers, DotDotIsRefused) {
  for (const char* name : {"../f", "a/../../f", "/../f", "a/.."}) {
    EXPECT_NE(test::refusal([&] { apply({TarBuilder().file(name, "").finish()}); }), "accepted") << name;
  }
  const std::string link = TarBuilder().file("a", "").hardlink("b", "../a").finish();
  EXPECT_NE(test::refusal([&] { apply({link}); }), "accepted");
}

TEST_F(Layers, BrokenHardLinksAreRefused) {
  EXPECT_NE(test::refusal([&] { apply({TarBuilder().hardlink("a", "missing").finish()}); }), "accepted");
  EXPECT_NE(test::refusal([&] { apply({TarBuilder().directory("d").hardlink("a", "d").finish()}); }),
            "accepted");
  EXPECT_NE(test::refusal([&] { apply({TarBuilder().hardlink("a", "/").finish()}); }), "accepted");
}

TEST_F(Layers, TheRootStaysADirectory) {
  EXPECT_NE(test::refusal([&] { apply({TarBuilder().file("./", "text").finish()}); }), "accepted");
  EXPECT_NE(test::refusal([&] { apply({TarBuilder().symlink(".", "usr").finish()}); }), "accepted");
}

TEST_F(Layers, WhatIsNoLayerIsRefused) {
  EXPECT_NE(test::refusal([&] { apply({test::noise(5000, 1)}); }), "accepted");
  EXPECT_NE(test::refusal([&] { apply({"hello"}); }), "accepted");
}

TEST_F(Layers, TruncatedTarsAreRefused) {
  const std::string tar =
      TarBuilder().file("a", std::string(3000, 'a')).file("b", std::string(3000, 'b')).unfinished();
  for (std::size_t length = 1; length < tar.size(); length += 37) {
    if (length % 3584 == 0) continue;  // between two entries: a tar without its end, which many tools make
    EXPECT_NE(test::refusal([&] { apply({tar.substr(0, length)}); }), "accepted") << length;
  }
}

TEST_F(Layers, TruncatedZstdIsRefused) {
  const std::string tar = TarBuilder().file("a", test::noise(30000, 2)).finish();
  std::string packed(ZSTD_compressBound(tar.size()), '\0');
  packed.resize(ZSTD_compress(packed.data(), packed.size(), tar.data(), tar.size(), 3));
  Tree tree = apply({packed});
  EXPECT_EQ(content(tree, "a"), test::noise(30000, 2));
  for (std::size_t length = 1; length < packed.size(); length += 997) {
    EXPECT_NE(test::refusal([&] { apply({packed.substr(0, length)}); }), "accepted") << length;
  }
}

TEST_F(Layers, EmptyLayersAddNothing) {
  Tree tree = apply({"", std::string(1024, '\0'), TarBuilder().file("f", "").finish(), ""});
  EXPECT_EQ(paths(tree), Paths{"f"});
}

TEST_F(Layers, ALayerThatDoesNotExistIsRefused) {
  EXPECT_ANY_THROW(Tree::from_layers({directory.path("missing")}, directory.path()));
}

// Names are bytes: nothing is recoded or normalised, whatever the locale of the process.
TEST_F(Layers, NamesKeepTheirBytesInEveryLocale) {
  const std::string composed = "caf\xc3\xa9";
  const std::string decomposed = "cafe\xcc\x81";
  const std::string latin = "caf\xe9";
  TarBuilder tar;
  for (const std::string& name : {composed, decomposed, latin}) {
    tar.file("ustar-" + name, name);
    tar.add({.name = "x", .content = name, .pax = {{"path", "pax-" + name}}});
    tar.add({.name = "x",
             .type = '2',
             .link = "x",
             .pax = {{"path", "link-" + name}, {"linkpath", "to-" + name}}});
    tar.add({.name = "x", .type = '1', .pax = {{"path", "hard-" + name}, {"linkpath", "pax-" + name}}});
  }
  const std::string before = std::setlocale(LC_ALL, nullptr);
  for (const char* locale : {"C", "C.UTF-8", "en_US.ISO-8859-1"}) {
    SCOPED_TRACE(locale);
    if (std::setlocale(LC_ALL, locale) == nullptr) continue;
    Tree tree = apply({tar.finish()});
    std::setlocale(LC_ALL, before.c_str());
    for (const std::string& name : {composed, decomposed, latin}) {
      EXPECT_EQ(content(tree, "ustar-" + name), name);
      EXPECT_EQ(content(tree, "pax-" + name), name);
      EXPECT_EQ(at(tree, "link-" + name).target, "to-" + name);
      EXPECT_EQ(&at(tree, "hard-" + name), &at(tree, "pax-" + name));
    }
    EXPECT_EQ(paths(tree).size(), 12U);
  }
}

TEST_F(Layers, SparseFilesReadAsZeros) {
  // GNU sparse format 1.0: the map stands before the data.
  std::string map = "2\n0\n4\n4096\n4\n";
  map.resize(512, '\0');
  TarBuilder tar;
  tar.add({.name = "GNUSparseFile.0/s",
           .content = map + "headtail",
           .pax = {{"GNU.sparse.major", "1"},
                   {"GNU.sparse.minor", "0"},
                   {"GNU.sparse.name", "s"},
                   {"GNU.sparse.realsize", "5000"}}});
  tar.file("after", "after");
  Tree tree = apply({tar.finish()});
  std::string expected(5000, '\0');
  expected.replace(0, 4, "head");
  expected.replace(4096, 4, "tail");
  EXPECT_EQ(content(tree, "s"), expected);
  EXPECT_EQ(content(tree, "after"), "after");
}

TEST_F(Layers, ManyLayers) {
  std::vector<std::string> tars;
  for (int i = 0; i < 150; ++i) {
    TarBuilder tar;
    tar.file("file" + std::to_string(i), std::to_string(i));
    tar.file("last", std::to_string(i));
    if (i > 0) tar.file(".wh.file" + std::to_string(i - 1), "");
    tars.push_back(tar.finish());
  }
  Tree tree = apply(tars);
  EXPECT_EQ(paths(tree), (Paths{"file149", "last"}));
  EXPECT_EQ(content(tree, "last"), "149");
}

}  // namespace
}  // namespace bootseer
