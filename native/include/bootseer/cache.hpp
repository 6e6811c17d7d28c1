// A cache directory, shared by all processes of a node. docs/formats/cache.md.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "bootseer/cache_blob.hpp"
#include "bootseer/chunk_map.hpp"
#include "bootseer/fd.hpp"

namespace bootseer {

// Opens blobs and makes them durable from time to time (one thread).
class Cache {
 public:
  // Creates the directory. Throws std::system_error, Error(usage) when it holds another format, or when
  // somebody holds it exclusively (maintenance).
  explicit Cache(std::string directory, double sync_interval_s = 5.0);
  ~Cache();
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  // `key` is a hex digest that names the content.
  std::shared_ptr<CacheBlob> open_blob(const std::string& key, std::shared_ptr<const ChunkMap> map);

  std::uint64_t usage_bytes() const;  // disk space of all blobs
  const std::string& directory() const noexcept { return directory_; }
  void close() noexcept;  // syncs; blobs stay usable, unsynced from then on

 private:
  void run();

  const std::string directory_;
  const std::chrono::nanoseconds sync_interval_;
  UniqueFd lock_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::weak_ptr<CacheBlob>> blobs_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace bootseer
