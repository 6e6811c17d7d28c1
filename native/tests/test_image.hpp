// Small images with every kind of chunk, and a temporary directory.
#pragma once

#include <stdlib.h>
#include <zstd.h>

#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bootseer/chunk_map.hpp"

namespace bootseer {

// mt19937 whose numbers have the type that chunk indices have.
class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  std::uint32_t operator()() { return static_cast<std::uint32_t>(engine_()); }

 private:
  std::mt19937 engine_;
};

struct TestImage {
  std::vector<std::byte> raw;
  std::vector<std::byte> blob;
  std::shared_ptr<const ChunkMap> map;

  std::string key() const { return to_hex(map->blob_sha256()); }
};

// Compressed, stored and zero chunks of 4 to 64 KiB, some sharing their bytes, a short one at the end.
inline TestImage make_test_image(std::uint32_t count, unsigned seed = 1) {
  Random random(seed);
  TestImage image;
  std::vector<Chunk> chunks;
  for (std::uint32_t i = 0; i < count; ++i) {
    Chunk chunk;
    chunk.raw_offset = image.raw.size();
    if (i % 11 == 10) {  // the same content as an earlier chunk, and the same place in the blob
      const Chunk& twin = chunks[random() % i];
      chunk.blob_offset = twin.blob_offset;
      chunk.raw_bytes = twin.raw_bytes;
      chunk.blob_bytes = twin.blob_bytes;
      chunk.sha256 = twin.sha256;
      const auto from = image.raw.begin() + static_cast<std::ptrdiff_t>(twin.raw_offset);
      const std::vector<std::byte> copy(from, from + twin.raw_bytes);
      image.raw.insert(image.raw.end(), copy.begin(), copy.end());
      chunks.push_back(chunk);
      continue;
    }
    chunk.raw_bytes = i + 1 == count ? 1234 : static_cast<std::uint32_t>(1 + random() % 16) * 4096;
    std::vector<std::byte> data(chunk.raw_bytes);
    if (i % 5 != 4) {
      const bool is_random = i % 5 == 3;
      for (auto& byte : data) byte = static_cast<std::byte>(is_random ? random() : random() % 4);
      std::vector<std::byte> packed(ZSTD_compressBound(data.size()));
      packed.resize(ZSTD_compress(packed.data(), packed.size(), data.data(), data.size(), 1));
      const auto& stored = packed.size() < data.size() ? packed : data;
      chunk.blob_offset = image.blob.size();
      chunk.blob_bytes = static_cast<std::uint32_t>(stored.size());
      image.blob.insert(image.blob.end(), stored.begin(), stored.end());
    }
    chunk.sha256 = sha256(data);
    image.raw.insert(image.raw.end(), data.begin(), data.end());
    chunks.push_back(chunk);
  }
  image.map = std::make_shared<ChunkMap>(image.raw.size(), 0, image.blob.size(), sha256(image.blob), chunks);
  return image;
}

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "bootseer-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp");
    path_ = pattern;
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace bootseer
