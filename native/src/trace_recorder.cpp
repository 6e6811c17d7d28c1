#include "bootseer/trace_recorder.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <ctime>

#include "bootseer/error.hpp"
#include "bootseer/transfer.hpp"

namespace bootseer {
namespace {

constexpr std::size_t kMaxPending = 65536;
constexpr std::size_t kWakeAt = 1024;
constexpr std::chrono::milliseconds kFlushInterval{100};

std::uint64_t unix_ns() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000U + static_cast<std::uint64_t>(now.tv_nsec);
}

}  // namespace

TraceRecorder::TraceRecorder(std::string path, std::uint64_t image_bytes)
    : path_(std::move(path)),
      image_bytes_(image_bytes),
      touched_(static_cast<std::size_t>(image_bytes / kTraceBlockBytes / 64 + 1)),
      opened_(std::chrono::steady_clock::now()) {
  try {
    recording_ = true;
    if (!continue_existing()) open_file();
  } catch (const std::system_error& error) {
    recording_ = false;
    error_ = error.code().value();
    return;
  }
  thread_ = std::thread([this] { run(); });
}

TraceRecorder::~TraceRecorder() {
  close();
}

void TraceRecorder::open_file() {
  fd_.reset(::open(path_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644));
  if (!fd_) throw_errno("open " + path_);
  std::array<std::byte, trace_format::kHeaderBytes> header;
  trace_format::write_header(header, image_bytes_, unix_ns());
  if (::write(fd_.get(), header.data(), header.size()) != static_cast<ssize_t>(header.size())) {
    throw_errno("write " + path_);
  }
}

bool TraceRecorder::continue_existing() {
  UniqueFd fd(::open(path_.c_str(), O_RDWR | O_APPEND | O_CLOEXEC));
  if (!fd) {
    if (errno == ENOENT) return false;
    throw_errno("open " + path_);
  }
  Trace known;
  try {
    known = Trace::load(path_);
  } catch (const Error&) {
    return false;  // damaged: begin again
  }
  if (known.image_bytes() != image_bytes_) return false;
  const auto valid = trace_format::kHeaderBytes + known.records().size() * trace_format::kRecordBytes;
  if (::ftruncate(fd.get(), static_cast<off_t>(valid)) != 0) throw_errno("repair " + path_);
  for (const TraceRecord& record : known.records()) {
    if (record.length == 0 || record.length > kMaxTraceRecordBytes || record.offset >= image_bytes_) continue;
    const std::uint64_t last = std::min(record.offset + record.length, image_bytes_) - 1;
    for (std::uint64_t b = record.offset / kTraceBlockBytes; b <= last / kTraceBlockBytes; ++b) {
      touched_[b / 64] |= std::uint64_t{1} << (b % 64);
    }
  }
  const std::uint64_t now = unix_ns();
  opened_after_ns_ = now > known.started_unix_ns() ? now - known.started_unix_ns() : 0;
  if (!known.records().empty()) opened_after_ns_ = std::max(opened_after_ns_, known.records().back().t_ns);
  records_ = known.records().size();
  if (known.is_finished()) recording_ = false;
  fd_ = std::move(fd);
  return true;
}

std::uint64_t TraceRecorder::elapsed_ns() const noexcept {
  const auto since = std::chrono::steady_clock::now() - opened_;
  return opened_after_ns_ +
         static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(since).count());
}

void TraceRecorder::touch(std::uint64_t offset, std::size_t length, std::uint32_t pid, bool is_new) noexcept {
  if (!is_recording() || length == 0) return;
  const std::uint64_t last = (offset + length - 1) / kTraceBlockBytes;
  for (std::uint64_t b = offset / kTraceBlockBytes; b <= last; ++b) {
    auto& word = touched_[b / 64];
    const std::uint64_t bit = std::uint64_t{1} << (b % 64);
    if ((word.load(std::memory_order_relaxed) & bit) != 0) continue;
    if ((word.fetch_or(bit, std::memory_order_relaxed) & bit) == 0) is_new = true;
  }
  if (!is_new) return;
  const std::uint64_t t_ns = elapsed_ns();
  while (length > 0) {
    const auto part = static_cast<std::uint32_t>(std::min<std::size_t>(length, kMaxTraceRecordBytes));
    push({.offset = offset, .length = part, .pid = pid, .t_ns = t_ns, .flags = 0});
    offset += part;
    length -= part;
  }
}

void TraceRecorder::push(const TraceRecord& record) noexcept {
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    if (pending_.size() >= kMaxPending || records_ + pending_.size() >= kMaxTraceRecords) {
      lost_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    try {
      pending_.push_back(record);
    } catch (const std::bad_alloc&) {
      lost_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    wake = pending_.size() == kWakeAt;
  }
  if (wake) changed_.notify_one();
}

void TraceRecorder::finish() noexcept {
  if (!recording_.exchange(false)) return;
  push({.offset = 0, .length = 0, .pid = 0, .t_ns = elapsed_ns(), .flags = TraceRecord::kReady});
  changed_.notify_one();
}

void TraceRecorder::run() {
  std::vector<TraceRecord> batch;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait_for(lock, kFlushInterval, [this] { return stopping_ || pending_.size() >= kWakeAt; });
    const bool stopping = stopping_;
    batch.clear();
    batch.swap(pending_);
    lock.unlock();
    const bool has_end =
        std::any_of(batch.begin(), batch.end(), [](const TraceRecord& record) { return record.flags != 0; });
    if (!batch.empty() || stopping) write_out(batch, stopping || has_end);
    lock.lock();
    if (stopping) return;
  }
}

void TraceRecorder::write_out(const std::vector<TraceRecord>& batch, bool sync) noexcept {
  if (error_ != 0) {
    lost_.fetch_add(batch.size(), std::memory_order_relaxed);
    return;
  }
  try {
    std::vector<std::byte> bytes(batch.size() * trace_format::kRecordBytes);
    for (std::size_t i = 0; i < batch.size(); ++i) {
      trace_format::write_record(
          std::span(bytes).subspan(i * trace_format::kRecordBytes).first<trace_format::kRecordBytes>(),
          batch[i]);
    }
    if (const int error = write_all(fd_.get(), bytes); error != 0) throw_errno("write " + path_, error);
    records_.fetch_add(batch.size(), std::memory_order_relaxed);
    if (sync && ::fdatasync(fd_.get()) != 0) throw_errno("sync " + path_);
  } catch (const std::system_error& error) {
    error_ = error.code().value();
    recording_ = false;
    lost_.fetch_add(batch.size(), std::memory_order_relaxed);
  } catch (const std::bad_alloc&) {
    lost_.fetch_add(batch.size(), std::memory_order_relaxed);
  }
}

void TraceRecorder::close() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  recording_ = false;
}

}  // namespace bootseer
