#include "bootseer/chunker.hpp"

#include <gtest/gtest.h>
#include <zstd.h>

#include <cstring>
#include <random>
#include <set>

#include "bootseer/erofs_writer.hpp"
#include "temp_dir.hpp"

namespace bootseer {
namespace {

using test::TempDir;

constexpr std::size_t kPage = kChunkAlignment;

class Chunker : public ::testing::Test {
 protected:
  ChunkMap chunk(const std::string& image, std::uint64_t meta_bytes = 0,
                 const std::vector<std::uint64_t>& extents = {}, const ChunkerOptions& options = {}) {
    return chunk_image(directory.write("image", image), directory.path("blob"), meta_bytes, extents, options,
                       {});
  }

  // What a reader makes of map and blob.
  std::string rebuild(const ChunkMap& map) {
    const std::vector<std::byte> blob = test::read_bytes(directory.path("blob"));
    EXPECT_EQ(blob.size(), map.blob_bytes());
    EXPECT_EQ(sha256(blob), map.blob_sha256());
    std::string image;
    for (const Chunk& chunk : map.chunks()) {
      EXPECT_EQ(chunk.raw_offset, image.size());
      std::string raw(chunk.raw_bytes, '\0');
      if (chunk.is_stored()) {
        std::memcpy(raw.data(), blob.data() + chunk.blob_offset, raw.size());
      } else if (!chunk.is_zeros()) {
        EXPECT_EQ(ZSTD_decompress(raw.data(), raw.size(), blob.data() + chunk.blob_offset, chunk.blob_bytes),
                  raw.size());
      }
      EXPECT_EQ(sha256(std::as_bytes(std::span(raw))), chunk.sha256);
      image += raw;
    }
    return image;
  }

  TempDir directory;
};

// Pages that compress, pages that do not, zeros, and repetitions of earlier parts.
std::string mixed_image(std::size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::string image;
  while (image.size() < bytes) {
    const std::size_t length = (1 + random() % 100) * kPage;
    switch (random() % 4) {
      case 0:
        image += std::string(length, '\0');
        break;
      case 1:
        image += test::noise(length, static_cast<unsigned>(random()));
        break;
      case 2:
        for (std::size_t i = 0; i < length / 8; ++i) image += std::to_string(10000000 + random() % 1000);
        break;
      default:
        image += image.substr(0, std::min(length, image.size()) / kPage * kPage);
    }
  }
  image.resize(bytes);
  return image;
}

TEST_F(Chunker, ChunksRebuildTheImage) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const std::size_t bytes = 1 + random() % (12U << 20);
    const std::string image = mixed_image(bytes, seed);
    const std::uint64_t meta_bytes = random() % (bytes / kPage + 1) * kPage;
    std::vector<std::uint64_t> extents;
    for (std::uint64_t at = meta_bytes; at < bytes; at += (1 + random() % 200) * kPage) extents.push_back(at);
    const ChunkMap map =
        chunk(image, meta_bytes, extents,
              {.average_bytes = (16U << 10) << seed % 7, .level = 1, .threads = 1 + seed % 4});
    EXPECT_EQ(map.image_bytes(), bytes);
    EXPECT_EQ(map.meta_bytes(), meta_bytes);
    EXPECT_TRUE(rebuild(map) == image);
    for (const Chunk& chunk : map.chunks()) {
      EXPECT_LE(chunk.raw_bytes, kMaxChunkBytes);
      // Metadata and contents never share a chunk.
      EXPECT_TRUE(chunk.raw_offset >= meta_bytes || chunk.raw_offset + chunk.raw_bytes <= meta_bytes);
    }
  }
}

TEST_F(Chunker, SizesAroundPagesAndTheReadWindow) {
  constexpr std::size_t kWindow = 4U << 20;
  for (const std::size_t bytes : {std::size_t{1}, kPage - 1, kPage, kPage + 1, kWindow - 1, kWindow,
                                  kWindow + 1, kWindow + kPage, 2 * kWindow}) {
    const std::string image = test::noise(bytes, 11);
    EXPECT_TRUE(rebuild(chunk(image)) == image) << bytes;
  }
}

TEST_F(Chunker, AnEmptyImageHasNoChunks) {
  const ChunkMap map = chunk("");
  EXPECT_EQ(map.count(), 0U);
  EXPECT_EQ(map.blob_bytes(), 0U);
}

TEST_F(Chunker, NoThreadsMeansOne) {
  const std::string image = mixed_image(3U << 20, 5);
  const ChunkMap map = chunk(image, 0, {}, {.threads = 0});
  EXPECT_TRUE(rebuild(map) == image);
}

TEST_F(Chunker, TheNumberOfThreadsDoesNotShow) {
  const std::string image = mixed_image(20U << 20, 8);
  const ChunkMap one = chunk(image, kPage, {}, {.threads = 1});
  const std::vector<std::byte> blob = test::read_bytes(directory.path("blob"));
  const ChunkMap many = chunk(image, kPage, {}, {.threads = 8});
  EXPECT_EQ(one.serialize(), many.serialize());
  EXPECT_TRUE(blob == test::read_bytes(directory.path("blob")));
}

TEST_F(Chunker, ZerosTakeNoPlace) {
  const ChunkMap map = chunk(std::string(10U << 20, '\0'));
  EXPECT_EQ(map.blob_bytes(), 0U);
  EXPECT_EQ(map.count(), 10U);  // nothing but the longest chunks
  for (const Chunk& chunk : map.chunks()) EXPECT_TRUE(chunk.is_zeros());
}

TEST_F(Chunker, EqualChunksAreStoredOnce) {
  const std::string part = test::noise(700 * kPage, 3);
  const std::vector<std::uint64_t> extents{0, part.size()};
  const ChunkMap once = chunk(part, 0, std::vector<std::uint64_t>{0});
  const ChunkMap twice = chunk(part + part, 0, extents);
  EXPECT_EQ(twice.blob_bytes(), once.blob_bytes());
  EXPECT_EQ(twice.blob_sha256(), once.blob_sha256());
  EXPECT_EQ(twice.count(), 2 * once.count());
  EXPECT_TRUE(rebuild(twice) == part + part);
}

TEST_F(Chunker, WhatDoesNotCompressIsStored) {
  const ChunkMap map = chunk(test::noise(2U << 20, 6));
  EXPECT_EQ(map.blob_bytes(), map.image_bytes());
  for (const Chunk& chunk : map.chunks()) EXPECT_TRUE(chunk.is_stored());
}

TEST_F(Chunker, ChunksBeginWhereFilesDo) {
  const std::string image = test::noise(600 * kPage, 2);
  std::vector<std::uint64_t> extents;
  for (std::uint64_t at = 0; at < image.size(); at += 20 * kPage) extents.push_back(at);
  const ChunkMap map = chunk(image, 0, extents);
  for (const std::uint64_t extent : extents) {
    const Chunk& chunk = map.chunk(map.index_of(extent));
    // Unless the chunk would become shorter than a quarter of the average.
    EXPECT_TRUE(chunk.raw_offset == extent || extent - chunk.raw_offset < 64U << 10) << extent;
  }
}

// What makes updates of an image cheap.
TEST_F(Chunker, MostChunksSurviveAnInsertedFile) {
  const auto digests = [&](const std::string& root) {
    Tree tree = Tree::from_directory(directory.path(root));
    const ErofsImage image = write_erofs(tree, directory.path("image"), {});
    const ChunkMap map =
        chunk_image(directory.path("image"), directory.path("blob"), image.meta_bytes, image.extents, {}, {});
    std::set<Digest> found;
    for (const Chunk& chunk : map.chunks()) found.insert(chunk.sha256);
    return found;
  };
  std::filesystem::create_directory(directory.path("root"));
  for (unsigned i = 0; i < 60; ++i) {
    directory.write("root/file" + std::to_string(100 + i), test::noise((i % 13 + 1) * 91000, i));
  }
  const std::set<Digest> before = digests("root");
  directory.write("root/file100a", test::noise(333333, 999));  // near the front: all others move
  const std::set<Digest> after = digests("root");
  std::size_t shared = 0;
  for (const Digest& digest : before) shared += after.contains(digest) ? 1 : 0;
  EXPECT_GE(static_cast<double>(shared), 0.8 * static_cast<double>(before.size()));
  EXPECT_LT(shared, after.size());
}

TEST_F(Chunker, ProgressGoesUpToTheWholeImage) {
  const std::string image = mixed_image(70U << 20, 1);
  std::vector<std::uint64_t> seen;
  chunk_image(directory.write("image", image), directory.path("blob"), 0, {}, {},
              [&](std::uint64_t done, std::uint64_t total) {
                EXPECT_EQ(total, image.size());
                seen.push_back(done);
              });
  EXPECT_GE(seen.size(), 3U);
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
  EXPECT_EQ(seen.back(), image.size());
}

TEST_F(Chunker, AnExceptionInProgressEndsIt) {
  directory.write("image", test::noise(40U << 20, 1));
  EXPECT_THROW(chunk_image(directory.path("image"), directory.path("blob"), 0, {}, {},
                           [](std::uint64_t, std::uint64_t) { throw std::runtime_error("stop"); }),
               std::runtime_error);
}

TEST_F(Chunker, FilesThatCannotBeOpenedSayWhy) {
  EXPECT_THROW(chunk_image(directory.path("missing"), directory.path("blob"), 0, {}, {}, {}),
               std::system_error);
  directory.write("image", "x");
  EXPECT_THROW(chunk_image(directory.path("image"), directory.path("no/blob"), 0, {}, {}, {}),
               std::system_error);
}

TEST(PageCutter, KeepsItsBounds) {
  for (const std::uint32_t average : {16U << 10, 64U << 10, 256U << 10, 1U << 20}) {
    SCOPED_TRACE(average);
    PageCutter cutter(average);
    std::uint32_t length = 0;
    std::size_t chunks = 0;
    constexpr std::size_t kPages = 20000;
    for (std::size_t page = 0; page < kPages; ++page) {
      const std::string content = test::noise(kPage, static_cast<unsigned>(page));
      ++length;
      if (!cutter.feed(std::as_bytes(std::span(content)))) {
        EXPECT_EQ(cutter.pages(), length);
        continue;
      }
      EXPECT_GE(length, std::max<std::uint32_t>(1, average / kPage / 4));
      EXPECT_LE(length, kMaxChunkBytes / kPage);
      EXPECT_EQ(cutter.pages(), 0U);
      length = 0;
      ++chunks;
    }
    // The mean is near what was asked for: a quarter of it is the least length, the rest geometric, cut at
    // the top.
    const double mean = static_cast<double>(kPages * kPage) / static_cast<double>(chunks);
    EXPECT_GT(mean, average * 0.5);
    EXPECT_LT(mean, average * 2.0);
  }
}

TEST(PageCutter, DependsOnContentOnly) {
  const auto cuts = [](std::size_t skip) {
    PageCutter cutter(64U << 10);
    std::set<std::size_t> found;
    for (std::size_t page = skip; page < 3000; ++page) {
      const std::string content = test::noise(kPage, static_cast<unsigned>(page));
      if (cutter.feed(std::as_bytes(std::span(content)))) found.insert(page);
    }
    return found;
  };
  const std::set<std::size_t> whole = cuts(0);
  const std::set<std::size_t> later = cuts(7);
  std::size_t shared = 0;
  for (const std::size_t page : later) shared += whole.contains(page) ? 1 : 0;
  EXPECT_GE(shared, later.size() - 3);  // they meet again soon after the start
}

TEST(PageCutter, ACutForAnotherReasonStartsAnew) {
  PageCutter cutter(256U << 10);
  const std::vector<std::byte> zeros(kPage);
  cutter.feed(zeros);
  EXPECT_EQ(cutter.pages(), 1U);
  cutter.cut();
  EXPECT_EQ(cutter.pages(), 0U);
  for (std::uint32_t page = 1; page < kMaxChunkBytes / kPage; ++page) EXPECT_FALSE(cutter.feed(zeros));
  EXPECT_TRUE(cutter.feed(zeros));
}

}  // namespace
}  // namespace bootseer
