#include "bootseer/block_file.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>

#include "bootseer/error.hpp"

namespace bootseer {
namespace {

// Collects one answer for a caller that blocks.
class Answer {
 public:
  explicit Answer(std::size_t length) : bytes_(length) {}

  std::span<std::byte> buffer() noexcept { return bytes_; }

  void set(std::span<const iovec> parts) noexcept {
    std::size_t at = 0;
    for (const iovec& part : parts) {
      std::memcpy(bytes_.data() + at, part.iov_base, part.iov_len);
      at += part.iov_len;
    }
    settle(0);
  }
  void fail(int errno_value) noexcept { settle(errno_value); }

  // The errno, or 0.
  int wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_settled_; });
    return errno_value_;
  }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  void settle(int errno_value) noexcept {
    const std::lock_guard lock(mutex_);
    errno_value_ = errno_value;
    is_settled_ = true;
    changed_.notify_all();
  }

  std::vector<std::byte> bytes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_settled_ = false;
  int errno_value_ = 0;
};

class AnswerReply final : public ReadReply {
 public:
  explicit AnswerReply(std::shared_ptr<Answer> answer) : answer_(std::move(answer)) {}
  void data(std::span<const iovec> parts) noexcept override { answer_->set(parts); }
  void error(int errno_value) noexcept override { answer_->fail(errno_value); }

 private:
  const std::shared_ptr<Answer> answer_;
};

}  // namespace

BlockFile::BlockFile(Cache& cache, const std::string& key, std::shared_ptr<const ChunkMap> map,
                     std::shared_ptr<Source> source, const BlockFileOptions& options)
    : map_owner_(std::move(map)),
      map_(*map_owner_),
      source_(std::move(source)),
      blob_(cache.open_blob(key, map_owner_)) {
  if (options.record && !options.trace_path.empty()) {
    recorder_ = std::make_unique<TraceRecorder>(options.trace_path, map_.image_bytes());
  }
  fetcher_ = std::make_unique<Fetcher>(map_, *blob_, *source_, options.fetcher);
}

BlockFile::~BlockFile() {
  close();
}

ssize_t BlockFile::try_read(std::uint64_t offset, std::size_t length, const ReadContext& context,
                            std::span<std::byte> scratch, iovec& out) noexcept {
  if (offset >= map_.image_bytes() || length == 0) {
    out = {scratch.data(), 0};
    return 0;
  }
  length = static_cast<std::size_t>(std::min<std::uint64_t>(length, map_.image_bytes() - offset));
  const std::uint32_t first = map_.index_of(offset);
  std::uint32_t last = first;
  bool has_zeros = false;
  while (true) {
    if (!blob_->is_ready(last) && !blob_->prove(last)) return -EAGAIN;
    has_zeros = has_zeros || map_.chunk(last).is_zeros();
    if (map_.chunk(last).raw_offset + map_.chunk(last).raw_bytes >= offset + length) break;
    ++last;
  }
  // A failing disk is a miss: read() fetches what cannot be read.
  const auto bytes = scratch.first(length);
  if (!blob_->read(offset, bytes)) return -EAGAIN;
  if (has_zeros) {
    for (std::uint32_t i = first; i <= last; ++i) {
      const Chunk& chunk = map_.chunk(i);
      if (!chunk.is_zeros()) continue;
      const std::uint64_t from = std::max(offset, chunk.raw_offset);
      const std::uint64_t to = std::min(offset + length, chunk.raw_offset + chunk.raw_bytes);
      std::memset(bytes.data() + (from - offset), 0, static_cast<std::size_t>(to - from));
    }
  }
  note_touch(offset, length, first, last, context.pid);
  hits_.fetch_add(1, std::memory_order_relaxed);
  read_bytes_.fetch_add(length, std::memory_order_relaxed);
  out = {bytes.data(), length};
  return static_cast<ssize_t>(length);
}

void BlockFile::note_touch(std::uint64_t offset, std::size_t length, std::uint32_t first, std::uint32_t last,
                           std::uint32_t pid) noexcept {
  bool is_new = false;
  for (std::uint32_t chunk = first; chunk <= last; ++chunk) {
    if (fetcher_->touch(chunk)) is_new = true;
  }
  if (recorder_) recorder_->touch(offset, length, pid, is_new);
}

void BlockFile::read(std::uint64_t offset, std::size_t length, const ReadContext& context,
                     std::unique_ptr<ReadReply> reply) noexcept {
  read_with(offset, length, context, std::move(reply), nullptr);
}

void BlockFile::read_with(std::uint64_t offset, std::size_t length, const ReadContext& context,
                          std::unique_ptr<ReadReply> reply, std::shared_ptr<ReadFailure> failure) noexcept {
  if (offset >= map_.image_bytes() || length == 0) {
    reply->data({});
    return;
  }
  length = static_cast<std::size_t>(std::min<std::uint64_t>(length, map_.image_bytes() - offset));
  note_touch(offset, length, map_.index_of(offset), map_.index_of(offset + length - 1), context.pid);
  misses_.fetch_add(1, std::memory_order_relaxed);
  read_bytes_.fetch_add(length, std::memory_order_relaxed);
  fetcher_->read(offset, length, std::move(reply), std::move(failure));
}

std::vector<std::byte> BlockFile::pread(std::uint64_t offset, std::size_t length) {
  if (offset >= map_.image_bytes()) return {};
  length = static_cast<std::size_t>(std::min<std::uint64_t>(length, map_.image_bytes() - offset));
  const auto answer = std::make_shared<Answer>(length);
  iovec view{};
  if (try_read(offset, length, {}, answer->buffer(), view) >= 0) return answer->take();
  const auto failure = std::make_shared<ReadFailure>();
  read_with(offset, length, {}, std::make_unique<AnswerReply>(answer), failure);
  if (const int errno_value = answer->wait(); errno_value != 0) {
    if (failure->message.empty()) throw std::system_error(errno_value, std::generic_category(), "read");
    throw Error(failure->code, failure->message);
  }
  return answer->take();
}

void BlockFile::mark_ready() noexcept {
  if (recorder_) recorder_->finish();
  fetcher_->start_background();
}

void BlockFile::close() noexcept {
  fetcher_->close();
  if (recorder_) recorder_->close();
  blob_->close();
}

Statistics BlockFile::statistics() const {
  Statistics out;
  const std::uint64_t hits = hits_.load();
  const std::uint64_t misses = misses_.load();
  out.add("image_bytes", map_.image_bytes());
  out.add("chunk_count", std::uint64_t{map_.count()});
  out.add("ready_bytes", blob_->present_bytes());
  out.add("complete", std::uint64_t{blob_->is_complete()});
  out.add("reads", hits + misses);
  out.add("hits", hits);
  out.add("misses", misses);
  out.add("read_bytes", read_bytes_.load());
  fetcher_->add_statistics(out);
  const SourceStatistics source = source_->statistics();
  out.add("source_requests", source.requests);
  out.add("retries", source.retries);
  out.add("connections", source.connections);
  out.add("body_bytes", source.body_bytes);
  const CacheStatistics cache = blob_->statistics();
  out.add("cache_verified_chunks", cache.verified_chunks);
  out.add("cache_log_dropped_bytes", cache.log_dropped_bytes);
  out.add("cache_last_errno", static_cast<std::uint64_t>(cache.last_errno));
  out.add("fallback_cache_write_failed", cache.write_failures);
  out.add("fallback_cache_log_failed", cache.log_failures);
  out.add("fallback_cache_sync_failed", cache.sync_failures);
  out.add("fallback_cache_corrupt", cache.corrupt_chunks);
  out.add("trace_records", recorder_ ? recorder_->records() : 0);
  out.add("trace_lost", recorder_ ? recorder_->lost() : 0);
  out.add("recording", std::uint64_t{recorder_ && recorder_->is_recording()});
  out.add("fallback_trace_unwritable", std::uint64_t{recorder_ && recorder_->error() != 0});
  return out;
}

}  // namespace bootseer
