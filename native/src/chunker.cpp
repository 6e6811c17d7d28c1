#include "bootseer/chunker.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>
#include <zstd.h>

#include <algorithm>
#include <bit>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "bootseer/error.hpp"
#include "bootseer/fd.hpp"
#include "bootseer/transfer.hpp"
#include "bootseer/zeros.hpp"

namespace bootseer {
namespace {

constexpr std::uint64_t kPage = kChunkAlignment;
constexpr std::size_t kQueuedChunks = 64;  // bounds the memory: twice as many MiB, raw and packed

struct Job {
  std::uint64_t raw_offset = 0;
  std::vector<std::byte> raw;
  std::vector<std::byte> packed;  // empty: zeros
  bool stored = false;
  Digest digest{};
  bool done = false;
  std::exception_ptr error;
};

void pack(Job& job, ZSTD_CCtx* context, int level) {
  job.digest = sha256(job.raw);
  if (is_zeros(job.raw)) return;
  job.packed.resize(ZSTD_compressBound(job.raw.size()));
  const std::size_t n =
      ZSTD_compressCCtx(context, job.packed.data(), job.packed.size(), job.raw.data(), job.raw.size(), level);
  if (ZSTD_isError(n) != 0) throw Error(Errc::internal, std::string("zstd: ") + ZSTD_getErrorName(n));
  // Not worth the decoding below a few percent.
  job.stored = n >= job.raw.size() - job.raw.size() / 32;
  job.packed.resize(job.stored ? 0 : n);
}

// Packs jobs on several threads and hands them back in order.
class Packer {
 public:
  Packer(unsigned threads, int level) {
    for (unsigned i = 0; i < std::max(1U, threads); ++i) {
      threads_.emplace_back([this, level] { work(level); });
    }
  }

  ~Packer() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
  }

  bool is_full() const { return order_.size() >= kQueuedChunks; }
  bool is_empty() const { return order_.empty(); }

  void add(std::unique_ptr<Job> job) {
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(job.get());
    }
    order_.push_back(std::move(job));
    changed_.notify_all();
  }

  std::unique_ptr<Job> next() {
    std::unique_ptr<Job> job = std::move(order_.front());
    order_.pop_front();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return job->done; });
    if (job->error) std::rethrow_exception(job->error);
    return job;
  }

 private:
  void work(int level) {
    const std::unique_ptr<ZSTD_CCtx, decltype(&ZSTD_freeCCtx)> context(ZSTD_createCCtx(), ZSTD_freeCCtx);
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return closed_ || !waiting_.empty(); });
      if (closed_) return;
      Job* const job = waiting_.front();
      waiting_.pop_front();
      lock.unlock();
      try {
        pack(*job, context.get(), level);
      } catch (...) {
        job->error = std::current_exception();
      }
      lock.lock();
      job->done = true;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job*> waiting_;
  bool closed_ = false;
  std::deque<std::unique_ptr<Job>> order_;  // touched by the owner's thread only
  std::vector<std::jthread> threads_;       // last: joined while the queue still exists
};

class BlobWriter {
 public:
  explicit BlobWriter(const std::string& path)
      : path_(path), fd_(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)) {
    if (!fd_) throw_errno(path);
  }

  Chunk add(const Job& job) {
    const auto raw_bytes = static_cast<std::uint32_t>(job.raw.size());
    Chunk chunk{job.raw_offset, 0, raw_bytes, 0, job.digest};
    if (job.packed.empty() && !job.stored) return chunk;
    const auto [known, fresh] = known_.try_emplace({job.digest, raw_bytes});
    if (fresh) {
      const std::span<const std::byte> bytes = job.stored ? std::span(job.raw) : std::span(job.packed);
      known->second = {offset_, static_cast<std::uint32_t>(bytes.size())};
      hash_.update(bytes);
      append(bytes);
    }
    chunk.blob_offset = known->second.offset;
    chunk.blob_bytes = known->second.bytes;
    return chunk;
  }

  std::uint64_t bytes() const noexcept { return offset_; }
  Digest finish() { return hash_.finish(); }

 private:
  struct Place {
    std::uint64_t offset = 0;
    std::uint32_t bytes = 0;
  };

  void append(std::span<const std::byte> bytes) {
    if (const int error = write_all(fd_.get(), bytes); error != 0) throw_errno(path_, error);
    offset_ += bytes.size();
  }

  std::string path_;
  UniqueFd fd_;
  std::uint64_t offset_ = 0;
  Sha256 hash_;
  std::map<std::pair<Digest, std::uint32_t>, Place> known_;
};

}  // namespace

PageCutter::PageCutter(std::uint32_t average_bytes)
    : mask_(std::bit_ceil(std::max<std::uint64_t>(2, average_bytes / kPage)) - 1),
      min_pages_(std::max(1U, average_bytes / kChunkAlignment / 4)),
      max_pages_(kMaxChunkBytes / kChunkAlignment) {}

bool PageCutter::feed(std::span<const std::byte> page) noexcept {
  ++pages_;
  const bool cut_here = pages_ >= max_pages_ ||
                        (pages_ >= min_pages_ && (XXH3_64bits(page.data(), page.size()) & mask_) == mask_);
  if (cut_here) pages_ = 0;
  return cut_here;
}

ChunkMap chunk_image(const std::string& image_path, const std::string& blob_path, std::uint64_t meta_bytes,
                     std::span<const std::uint64_t> extents, const ChunkerOptions& options,
                     const ProgressCallback& progress) {
  const UniqueFd image(::open(image_path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!image) throw_errno(image_path);
  struct stat status {};
  if (::fstat(image.get(), &status) != 0) throw_errno(image_path);
  const auto image_bytes = static_cast<std::uint64_t>(status.st_size);
  ::posix_fadvise(image.get(), 0, 0, POSIX_FADV_SEQUENTIAL);

  BlobWriter blob(blob_path);
  Packer packer(options.threads, options.level);
  PageCutter cutter(options.average_bytes);
  std::vector<Chunk> chunks;
  const std::uint64_t min_bytes = std::max<std::uint64_t>(kPage, options.average_bytes / 4);
  auto extent = extents.begin();

  std::vector<std::byte> window(4U << 20);
  auto job = std::make_unique<Job>();
  std::uint64_t reported = 0;
  const auto finish_chunk = [&](std::uint64_t next_offset) {
    if (packer.is_full()) chunks.push_back(blob.add(*packer.next()));
    packer.add(std::move(job));
    job = std::make_unique<Job>();
    job->raw_offset = next_offset;
  };
  for (std::uint64_t offset = 0; offset < image_bytes;) {
    const ssize_t n = ::pread(image.get(), window.data(), window.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_errno(image_path);
    if (n == 0) throw Error(Errc::internal, image_path + " became shorter");
    // Only whole pages, except at the end of the image.
    auto usable = static_cast<std::uint64_t>(n);
    if (offset + usable < image_bytes) usable -= usable % kPage;
    for (std::uint64_t at = 0; at < usable;) {
      const std::uint64_t here = offset + at;
      const std::uint64_t length = std::min(kPage, usable - at);
      while (extent != extents.end() && *extent < here) ++extent;
      const bool at_file = extent != extents.end() && *extent == here;
      if (!job->raw.empty() && (here == meta_bytes || (at_file && job->raw.size() >= min_bytes))) {
        cutter.cut();
        finish_chunk(here);
      }
      const std::span<const std::byte> page = std::span(window).subspan(at, length);
      job->raw.insert(job->raw.end(), page.begin(), page.end());
      at += length;
      if (cutter.feed(page)) finish_chunk(here + length);
    }
    offset += usable;
    if (progress && offset - reported >= (32U << 20)) {
      reported = offset;
      progress(offset, image_bytes);
    }
  }
  if (!job->raw.empty()) finish_chunk(image_bytes);
  while (!packer.is_empty()) chunks.push_back(blob.add(*packer.next()));
  if (progress) progress(image_bytes, image_bytes);
  const std::uint64_t blob_bytes = blob.bytes();
  return ChunkMap(image_bytes, meta_bytes, blob_bytes, blob.finish(), std::move(chunks));
}

}  // namespace bootseer
