#include "bootseer/cache.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "bootseer/error.hpp"

namespace bootseer {
namespace {

constexpr std::string_view kFormat = "bootseer cache 1\n";

// A file of at most a few bytes that says which format the directory has.
void check_format(const std::string& directory) {
  const std::string path = directory + "/FORMAT";
  const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (!fd) throw_errno("open " + path);
  char text[64];
  const ssize_t got = ::pread(fd.get(), text, sizeof text, 0);
  if (got < 0) throw_errno("read " + path);
  if (got == 0) {
    if (::pwrite(fd.get(), kFormat.data(), kFormat.size(), 0) != static_cast<ssize_t>(kFormat.size())) {
      throw_errno("write " + path);
    }
  } else if (std::string_view(text, static_cast<std::size_t>(got)) != kFormat) {
    throw Error(Errc::usage, "the cache directory has an unknown format: " + directory);
  }
}

void make_directories(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) throw std::system_error(error, "create " + path);
}

}  // namespace

Cache::Cache(std::string directory, double sync_interval_s)
    : directory_(std::move(directory)),
      sync_interval_(static_cast<std::int64_t>(std::clamp(sync_interval_s, 0.01, 3600.0) * 1e9)) {
  make_directories(directory_ + "/blobs");
  const std::string lock_path = directory_ + "/lock";
  lock_.reset(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (!lock_) throw_errno("open " + lock_path);
  // Shared: every user of the directory. Exclusive is for maintenance that must be alone (eviction,
  // clearing).
  if (::flock(lock_.get(), LOCK_SH | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) throw_errno("lock " + lock_path);
    throw Error(Errc::usage, "the cache directory is locked for maintenance: " + directory_);
  }
  check_format(directory_);
  thread_ = std::thread([this] { run(); });
}

Cache::~Cache() {
  close();
}

std::shared_ptr<CacheBlob> Cache::open_blob(const std::string& key, std::shared_ptr<const ChunkMap> map) {
  if (!is_hex_digest(key)) throw Error(Errc::usage, "a cache key is 64 lower-case hexadecimal digits");
  const std::string path = directory_ + "/blobs/" + key;
  make_directories(path);
  auto blob = std::make_shared<CacheBlob>(path, std::move(map));
  const std::lock_guard lock(mutex_);
  std::erase_if(blobs_, [](const auto& known) { return known.expired(); });
  blobs_.push_back(blob);
  return blob;
}

std::uint64_t Cache::usage_bytes() const {
  std::uint64_t bytes = 0;
  std::error_code error;
  for (const auto& blob : std::filesystem::directory_iterator(directory_ + "/blobs", error)) {
    for (const auto& file : std::filesystem::directory_iterator(blob.path(), error)) {
      struct stat status {};
      if (::stat(file.path().c_str(), &status) == 0)
        bytes += static_cast<std::uint64_t>(status.st_blocks) * 512;
    }
  }
  return bytes;
}

void Cache::close() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  lock_.reset();
}

void Cache::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    changed_.wait_for(lock, sync_interval_, [this] { return stopping_; });
    auto blobs = blobs_;
    lock.unlock();
    for (const auto& weak : blobs) {
      if (const auto blob = weak.lock()) blob->sync();
    }
    lock.lock();
  }
}

}  // namespace bootseer
