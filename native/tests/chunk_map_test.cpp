#include "bootseer/chunk_map.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>

#include "bootseer/bytes.hpp"
#include "bootseer/crc32c.hpp"
#include "bootseer/error.hpp"
#include "refusal.hpp"

namespace bootseer {
namespace {

std::span<const std::byte> as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

Digest zeros_digest(std::size_t bytes) {
  return sha256(std::vector<std::byte>(bytes));
}

Digest some_digest(std::uint8_t fill) {
  Digest digest;
  digest.fill(fill);
  return digest;
}

// Stored, zeros, compressed, and a short last chunk.
std::vector<Chunk> valid_chunks() {
  return {
      {0, 0, 8192, 8192, some_digest(1)},
      {8192, 0, 4096, 0, zeros_digest(4096)},
      {12288, 8192, 65536, 1000, some_digest(2)},
      {77824, 9192, 100, 90, some_digest(3)},
  };
}
constexpr std::uint64_t kImageBytes = 77924;
constexpr std::uint64_t kBlobBytes = 9282;

ChunkMap valid_map() {
  return ChunkMap(kImageBytes, 4096, kBlobBytes, some_digest(9), valid_chunks());
}

std::string why_chunks(std::vector<Chunk> chunks, std::uint64_t image_bytes = kImageBytes) {
  return test::refusal([&] { ChunkMap(image_bytes, 0, kBlobBytes, some_digest(9), std::move(chunks)); });
}

TEST(Crc32c, KnownAnswerAndBothPathsAgree) {
  EXPECT_EQ(crc32c(as_bytes("123456789")), 0xe3069283U);
  EXPECT_EQ(crc32c_portable(as_bytes("123456789")), 0xe3069283U);
  const std::string text(1003, 'x');
  for (std::size_t cut : {0U, 1U, 7U, 8U, 500U, 1003U}) {
    const auto head = as_bytes(text).first(cut);
    const auto tail = as_bytes(text).subspan(cut);
    EXPECT_EQ(crc32c(tail, crc32c(head)), crc32c_portable(as_bytes(text)));
  }
}

TEST(Sha256, KnownAnswerWholeAndInPieces) {
  const std::string expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
  EXPECT_EQ(to_hex(sha256(as_bytes("abc"))), expected);
  Sha256 pieces;
  pieces.update(as_bytes("a"));
  pieces.update(as_bytes("bc"));
  EXPECT_EQ(to_hex(pieces.finish()), expected);
  EXPECT_TRUE(is_hex_digest(expected));
  EXPECT_FALSE(is_hex_digest(expected.substr(1)));
  EXPECT_FALSE(is_hex_digest("../" + expected.substr(3)));
}

TEST(ChunkMap, RoundTrips) {
  const ChunkMap map = valid_map();
  const auto bytes = map.serialize();
  EXPECT_EQ(bytes.size(), 96U + 4 * 56U);
  const ChunkMap again = ChunkMap::parse(bytes);
  EXPECT_EQ(again.serialize(), bytes);
  EXPECT_EQ(again.digest(), sha256(bytes));
  EXPECT_EQ(again.image_bytes(), kImageBytes);
  EXPECT_EQ(again.meta_bytes(), 4096U);
  EXPECT_EQ(again.blob_bytes(), kBlobBytes);
  EXPECT_EQ(again.blob_sha256(), some_digest(9));
  EXPECT_EQ(again.chunk(2).blob_offset, 8192U);
}

TEST(ChunkMap, EmptyImage) {
  const ChunkMap map(0, 0, 0, sha256({}), {});
  EXPECT_EQ(ChunkMap::parse(map.serialize()).count(), 0U);
}

TEST(ChunkMap, IndexOfFindsTheChunkOfEveryByteOffset) {
  std::vector<Chunk> chunks;
  std::uint64_t offset = 0;
  for (std::uint32_t i = 0; i < 300; ++i) {
    const std::uint32_t raw = (1 + i * 37 % 256) * 4096;
    chunks.push_back({offset, 0, raw, 0, zeros_digest(raw)});
    offset += raw;
  }
  const ChunkMap map(offset, 0, 0, sha256({}), chunks);
  for (std::uint32_t i = 0; i < 300; ++i) {
    EXPECT_EQ(map.index_of(chunks[i].raw_offset), i);
    EXPECT_EQ(map.index_of(chunks[i].raw_offset + chunks[i].raw_bytes - 1), i);
  }
}

TEST(ChunkMap, RefusesBadGeometry) {
  EXPECT_EQ(why_chunks(valid_chunks()), "accepted");
  auto chunks = valid_chunks();
  chunks[1].raw_offset -= 4096;
  EXPECT_NE(why_chunks(chunks).find("overlaps"), std::string::npos);
  chunks = valid_chunks();
  chunks[2].raw_offset += 4096;
  EXPECT_NE(why_chunks(chunks).find("hole"), std::string::npos);
  chunks = valid_chunks();
  chunks[0].raw_bytes = 0;
  EXPECT_NE(why_chunks(chunks).find("raw length"), std::string::npos);
  chunks = valid_chunks();
  chunks[3].raw_bytes = kMaxChunkBytes + 4096;  // would decompress to more than a chunk may have
  EXPECT_NE(why_chunks(chunks).find("raw length"), std::string::npos);
  chunks = valid_chunks();
  chunks[0].raw_bytes += 1;
  EXPECT_NE(why_chunks(chunks).find("unaligned"), std::string::npos);
  EXPECT_NE(why_chunks(valid_chunks(), kImageBytes + 1).find("cover"), std::string::npos);
  EXPECT_NE(why_chunks({}, std::numeric_limits<std::uint64_t>::max()).find("too large"), std::string::npos);
}

TEST(ChunkMap, RefusesBadBlobRanges) {
  auto chunks = valid_chunks();
  chunks[3].blob_offset = kBlobBytes - 89;
  EXPECT_NE(why_chunks(chunks).find("outside"), std::string::npos);
  chunks[3].blob_offset = std::numeric_limits<std::uint64_t>::max() - 10;  // offset + length wraps
  EXPECT_NE(why_chunks(chunks).find("outside"), std::string::npos);
  chunks = valid_chunks();
  chunks[3].blob_offset -= 1;
  EXPECT_NE(why_chunks(chunks).find("overlaps another"), std::string::npos);
  chunks = valid_chunks();
  chunks[2].blob_bytes = 100000;
  EXPECT_NE(why_chunks(chunks).find("too long"), std::string::npos);
  chunks = valid_chunks();
  chunks[1].sha256 = some_digest(4);
  EXPECT_NE(why_chunks(chunks).find("not all zeros"), std::string::npos);
}

TEST(ChunkMap, SharedRangesNeedEqualContent) {
  std::vector<Chunk> chunks = {{0, 0, 4096, 50, some_digest(1)}, {4096, 0, 4096, 50, some_digest(1)}};
  EXPECT_EQ(why_chunks(chunks, 8192), "accepted");
  chunks[1].sha256 = some_digest(2);
  EXPECT_NE(why_chunks(chunks, 8192).find("different chunk"), std::string::npos);
}

TEST(ChunkMap, RefusesDamagedBytes) {
  const auto good = valid_map().serialize();
  for (std::size_t i = 0; i < good.size(); ++i) {
    auto bytes = good;
    bytes[i] ^= std::byte{0x10};
    EXPECT_NE(test::refusal([&] { ChunkMap::parse(bytes); }), "accepted") << "byte " << i;
  }
  for (std::size_t length = 0; length < good.size(); ++length) {
    EXPECT_NE(test::refusal([&] { ChunkMap::parse(std::span(good).first(length)); }), "accepted");
  }
}

TEST(ChunkMap, ReservedFlagsAndCountsAreCheckedBehindAValidChecksum) {
  const auto with = [](std::size_t offset, std::uint32_t value) {
    auto bytes = valid_map().serialize();
    store_le(bytes.data() + offset, value);
    store_le(bytes.data() + 92, std::uint32_t{0});
    store_le(bytes.data() + 92, crc32c(bytes));
    return test::refusal([&] { ChunkMap::parse(bytes); });
  };
  EXPECT_NE(with(76, 1).find("flags"), std::string::npos);
  EXPECT_NE(with(84, 1).find("reserved"), std::string::npos);
  EXPECT_NE(with(8, 2).find("version"), std::string::npos);
  EXPECT_NE(with(72, 5).find("count"), std::string::npos);
  EXPECT_NE(with(72, 0xffffffffU).find("more than"), std::string::npos);
  EXPECT_NE(with(24, 0x7fffffffU).find("metadata"), std::string::npos);
}

}  // namespace
}  // namespace bootseer
