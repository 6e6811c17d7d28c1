#include "bootseer/cache_blob.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "bootseer/bytes.hpp"
#include "bootseer/crc32c.hpp"
#include "bootseer/error.hpp"
#include "bootseer/transfer.hpp"

namespace bootseer {
namespace {

using cache_log::kHeaderBytes;
using cache_log::kRecordBytes;

constexpr auto kLockPatience = std::chrono::seconds(10);
constexpr std::chrono::nanoseconds kRefusalPause = std::chrono::milliseconds(500);
constexpr std::size_t kFirstLogPieceBytes = 4096;
constexpr std::size_t kLogPieceBytes = 1 << 20;
static_assert(kFirstLogPieceBytes % kRecordBytes == 0 && kLogPieceBytes % kRecordBytes == 0);

std::int64_t now_ns() noexcept {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

void sync_directory(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd || ::fsync(fd.get()) != 0) throw_errno("sync " + path);
}

}  // namespace

CacheBlob::CacheBlob(const std::string& directory, std::shared_ptr<const ChunkMap> map)
    : map_owner_(std::move(map)),
      map_(*map_owner_),
      directory_(directory),
      data_path_(directory + "/data"),
      log_path_(directory + "/ready.log"),
      ready_((map_.count() + 63) / 64),
      claims_(map_.count()),
      data_crcs_(map_.count()),
      replay_(map_.count()) {
  open_files();
  for (std::uint32_t i = 0; i < map_.count(); ++i) {
    if (map_.chunk(i).is_zeros()) set_ready(i);
  }
}

CacheBlob::~CacheBlob() {
  close();
}

void CacheBlob::open_files() {
  const std::string lock_path = directory_ + "/lock";
  lock_.reset(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (!lock_) throw_errno("open " + lock_path);
  const std::string claims_path = directory_ + "/fetching";
  fetch_claims_.reset(::open(claims_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (!fetch_claims_) throw_errno("open " + claims_path);
  // Whoever comes first is alone for a moment (exclusive) and repairs what a crash has left; everybody works
  // under the shared lock.
  const auto give_up = std::chrono::steady_clock::now() + kLockPatience;
  while (true) {
    bool locked = true;
    const bool alone = ::flock(lock_.get(), LOCK_EX | LOCK_NB) == 0;
    if (!alone) locked = ::flock(lock_.get(), LOCK_SH | LOCK_NB) == 0;
    if (locked) {
      open_data(alone);
      const bool opened = open_log(alone);
      // Turning the lock into a shared one is not atomic: somebody may have been alone in between and have
      // replaced the log.
      if (alone && ::flock(lock_.get(), LOCK_SH) != 0) throw_errno("lock " + lock_path);
      if (opened && is_current()) return;
    }
    if (std::chrono::steady_clock::now() > give_up) {
      throw Error(Errc::usage, "the cached blob stays locked by another process: " + directory_);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void CacheBlob::open_data(bool alone) {
  data_.reset(::open(data_path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (!data_) throw_errno("open " + data_path_);
  struct stat status {};
  if (::fstat(data_.get(), &status) != 0) throw_errno("stat " + data_path_);
  const auto wanted = static_cast<off_t>(map_.image_bytes());
  if (status.st_size < wanted || (alone && status.st_size != wanted)) {
    if (::ftruncate(data_.get(), wanted) != 0) throw_errno("size " + data_path_);
  }
}

// False when the log is not there yet although somebody else is at work.
bool CacheBlob::open_log(bool alone) {
  replay_ = cache_log::Replay(map_.count());
  replayed_bytes_ = own_bytes_ = 0;
  log_.reset(::open(log_path_.c_str(), O_RDWR | O_APPEND | O_CLOEXEC));
  if (!log_ && errno != ENOENT) throw_errno("open " + log_path_);
  if (!log_ && !alone) return false;
  bool is_new = !log_;
  if (log_) {
    cache_log::Header header;
    const ssize_t got = pread_all(log_.get(), header, 0);
    if (got < 0)
      throw std::system_error(static_cast<int>(-got), std::generic_category(), "read " + log_path_);
    const auto head = std::span(header).first(static_cast<std::size_t>(got));
    if (!cache_log::is_header(head, map_.digest(), map_.count())) {
      if (!alone) throw Error(Errc::usage, "the cached blob is in use with another chunk map: " + directory_);
      is_new = true;
    }
  }
  if (is_new) {
    // Data may be there all the same (log lost, or made for another map). SHA-256 decides on the first hit.
    rewrite_log();
    claim_unrecorded_data();
    return true;
  }
  replay_from_file();
  settle_all();
  struct stat status {};
  if (::fstat(log_.get(), &status) != 0) throw_errno("stat " + log_path_);
  const auto torn = static_cast<std::uint64_t>(status.st_size) - replayed_bytes_;
  if (torn > 0) {
    log_dropped_bytes_ = torn;
    if (alone && ::ftruncate(log_.get(), static_cast<off_t>(replayed_bytes_)) != 0) {
      throw_errno("repair " + log_path_);
    }
    claim_unrecorded_data();
  }
  if (alone && replay_.records() > 4 * map_.count() + 1024) rewrite_log();
  return true;
}

// Replaces the log by the shortest one that says the same. Only when alone.
void CacheBlob::rewrite_log() {
  const std::string new_path = log_path_ + ".new";
  UniqueFd fd(::open(new_path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644));
  if (!fd) throw_errno("create " + new_path);
  std::vector<std::byte> bytes;
  const auto add = [&bytes](std::span<const std::byte> part) {
    bytes.insert(bytes.end(), part.begin(), part.end());
  };
  add(cache_log::make_header(map_.digest(), map_.count()));
  std::uint32_t proven = 0;
  for (const bool want_proven : {true, false}) {
    for (std::uint32_t i = 0; i < map_.count(); ++i) {
      if (!replay_.is_claimed(i) || replay_.is_proven(i) != want_proven) continue;
      add(cache_log::make_record(cache_log::kReady, i, replay_.claims()[i].data_crc));
      if (want_proven) ++proven;
    }
  }
  add(cache_log::make_record(cache_log::kDurable, proven, 0));
  if (const int error = pwrite_all(fd.get(), bytes, 0); error != 0) {
    throw std::system_error(error, std::generic_category(), "write " + new_path);
  }
  if (::fsync(fd.get()) != 0) throw_errno("sync " + new_path);
  if (::rename(new_path.c_str(), log_path_.c_str()) != 0) throw_errno("replace " + log_path_);
  sync_directory(directory_);
  log_ = std::move(fd);
  replay_ = cache_log::Replay(map_.count());
  replayed_bytes_ = own_bytes_ = 0;
  replay_from_file();
  settle_all();
}

bool CacheBlob::is_current() const noexcept {
  struct stat ours {};
  struct stat current {};
  return ::fstat(log_.get(), &ours) == 0 && ::stat(log_path_.c_str(), &current) == 0 &&
         ours.st_ino == current.st_ino && ours.st_dev == current.st_dev;
}

void CacheBlob::replay_from_file() {
  if (replayed_bytes_ == 0) replayed_bytes_ = kHeaderBytes;
  std::vector<std::byte> piece(kFirstLogPieceBytes);  // most catch-ups are a few records
  while (true) {
    const ssize_t got = pread_all(log_.get(), piece, replayed_bytes_);
    if (got < 0)
      throw std::system_error(static_cast<int>(-got), std::generic_category(), "read " + log_path_);
    const std::size_t applied = replay_.apply(std::span(piece).first(static_cast<std::size_t>(got)));
    replayed_bytes_ += applied;
    if (applied < piece.size()) return;
    piece.resize(kLogPieceBytes);
  }
}

void CacheBlob::settle(std::uint32_t chunk) noexcept {
  if (is_ready(chunk)) return;
  if (!replay_.is_claimed(chunk)) {
    claims_[chunk].store(kAbsent, std::memory_order_release);
    return;
  }
  data_crcs_[chunk].store(replay_.claims()[chunk].data_crc, std::memory_order_relaxed);
  claims_[chunk].store(replay_.is_proven(chunk) ? kProven : kUnproven, std::memory_order_release);
}

void CacheBlob::settle_all() noexcept {
  for (std::uint32_t i = 0; i < map_.count(); ++i) settle(i);
}

void CacheBlob::claim_unrecorded_data() noexcept {
  std::uint64_t data_from = 0;  // first byte at or after the chunk that is not in a hole
  for (std::uint32_t i = 0; i < map_.count(); ++i) {
    const Chunk& chunk = map_.chunk(i);
    if (data_from < chunk.raw_offset || i == 0) {
      const off_t at = ::lseek(data_.get(), static_cast<off_t>(chunk.raw_offset), SEEK_DATA);
      if (at < 0) return;  // ENXIO: only a hole from here on
      data_from = static_cast<std::uint64_t>(at);
    }
    if (data_from >= chunk.raw_offset + chunk.raw_bytes) continue;
    if (claims_[i].load(std::memory_order_relaxed) == kAbsent) {
      claims_[i].store(kUnproven, std::memory_order_release);
    }
  }
}

bool CacheBlob::prove(std::uint32_t chunk) noexcept {
  if (is_ready(chunk)) return true;
  const auto claim = claims_[chunk].load(std::memory_order_acquire);
  if (claim == kAbsent) return false;
  const Chunk& entry = map_.chunk(chunk);
  bool is_right = false;
  std::uint32_t data_crc = 0;
  try {
    thread_local std::vector<std::byte> buffer;
    if (buffer.size() < entry.raw_bytes) buffer.resize(entry.raw_bytes);
    const auto raw = std::span(buffer).first(entry.raw_bytes);
    if (read(entry.raw_offset, raw)) {
      if (claim == kUnproven) data_crc = crc32c(raw);
      is_right = claim == kProven ? crc32c(raw) == data_crcs_[chunk].load(std::memory_order_relaxed)
                                  : sha256(raw) == entry.sha256;
    }
  } catch (const std::exception&) {
    return false;  // out of memory: as if it were not there
  }
  if (!is_right) {
    drop(chunk);
    return false;
  }
  verified_chunks_.fetch_add(1, std::memory_order_relaxed);
  set_ready(chunk);
  // Recorded again (or for the first time, when its record was lost): the next sync will prove it.
  if (claim == kUnproven) append(cache_log::kReady, chunk, data_crc);
  return true;
}

bool CacheBlob::read(std::uint64_t offset, std::span<std::byte> out) noexcept {
  const ssize_t got = pread_all(data_.get(), out, offset);
  if (got == static_cast<ssize_t>(out.size())) return true;
  if (got >= 0) distrust_all();
  errno = got < 0 ? static_cast<int>(-got) : EIO;
  return false;
}

// Somebody has cut the file. The next write beyond its end makes zeros out of what was lost, so everything
// has to be looked at again.
void CacheBlob::distrust_all() noexcept {
  for (std::uint32_t i = 0; i < map_.count(); ++i) {
    if (!is_ready(i) || map_.chunk(i).is_zeros()) continue;
    claims_[i].store(kUnproven, std::memory_order_release);
    ready_[i / 64].fetch_and(~(std::uint64_t{1} << (i % 64)), std::memory_order_acq_rel);
  }
}

bool CacheBlob::put(std::uint32_t chunk, std::span<const std::byte> raw) noexcept {
  if (is_ready(chunk)) return true;
  if (closed_.load(std::memory_order_acquire) || is_refusing()) return false;
  const Chunk& entry = map_.chunk(chunk);
  struct stat status {};
  if (::fstat(data_.get(), &status) == 0 && static_cast<std::uint64_t>(status.st_size) < map_.image_bytes()) {
    distrust_all();
  }
  if (const int error = pwrite_all(data_.get(), raw, entry.raw_offset); error != 0) {
    failed(write_failures_, error);
    refusing_until_ns_.store(now_ns() + kRefusalPause.count(), std::memory_order_relaxed);
    return false;
  }
  set_ready(chunk);
  append(cache_log::kReady, chunk, crc32c(raw));
  return true;
}

void CacheBlob::drop(std::uint32_t chunk) noexcept {
  if (map_.chunk(chunk).is_zeros()) return;
  corrupt_chunks_.fetch_add(1, std::memory_order_relaxed);
  claims_[chunk].store(kAbsent, std::memory_order_release);
  ready_[chunk / 64].fetch_and(~(std::uint64_t{1} << (chunk % 64)), std::memory_order_acq_rel);
  append(cache_log::kDropped, chunk, 0);
}

void CacheBlob::set_ready(std::uint32_t chunk) noexcept {
  ready_[chunk / 64].fetch_or(std::uint64_t{1} << (chunk % 64), std::memory_order_acq_rel);
}

// A record goes out in one write at the end of the file (O_APPEND), so that records of several processes
// never mix. It comes after its data was handed to the kernel.
void CacheBlob::append(cache_log::Kind kind, std::uint32_t value, std::uint32_t data_crc) noexcept {
  if (closed_.load(std::memory_order_acquire)) return;
  const auto record = cache_log::make_record(kind, value, data_crc);
  const std::lock_guard lock(log_mutex_);
  if (log_is_broken_) return;
  ssize_t put = -1;
  do {
    put = ::write(log_.get(), record.data(), record.size());
  } while (put < 0 && errno == EINTR);
  if (put == static_cast<ssize_t>(record.size())) {
    own_bytes_ += record.size();
  } else {
    failed(log_failures_, put < 0 ? errno : ENOSPC);
    log_is_broken_ = put > 0;  // half a record: nothing after it would be believed
  }
}

bool CacheBlob::refresh() noexcept {
  try {
    const std::lock_guard lock(log_mutex_);
    struct stat status {};
    if (::fstat(log_.get(), &status) != 0) return false;
    if (static_cast<std::uint64_t>(status.st_size) <= replayed_bytes_ + own_bytes_) return false;
    return catch_up_locked();
  } catch (const std::exception&) {
    return false;  // as if nothing had been recorded
  }
}

// Replays what was appended since, by us and by others. True when there was something.
bool CacheBlob::catch_up_locked() {
  const std::uint64_t from = replayed_bytes_;
  replay_from_file();
  own_bytes_ = 0;
  std::vector<std::byte> bytes(static_cast<std::size_t>(replayed_bytes_ - from));
  const ssize_t got = pread_all(log_.get(), bytes, from);
  for (std::size_t at = 0; got > 0 && at + kRecordBytes <= static_cast<std::size_t>(got);
       at += kRecordBytes) {
    const auto value = load_le<std::uint32_t>(bytes.data() + at + 4);
    if (load_le<std::uint32_t>(bytes.data() + at) != cache_log::kDurable) settle(value);
  }
  return replayed_bytes_ > from;
}

bool CacheBlob::claim_fetch(std::uint32_t id) noexcept {
  if (set_claim(id, F_WRLCK)) return true;
  return errno != EAGAIN && errno != EACCES;  // a file system without locks: everybody for himself
}

void CacheBlob::release_fetch(std::uint32_t id) noexcept {
  set_claim(id, F_UNLCK);
}

bool CacheBlob::set_claim(std::uint32_t id, short type) noexcept {
  struct flock range {};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = id;
  range.l_len = 1;
  // Bound to the open file, not to the process: two files in one process are two parties as well.
  return ::fcntl(fetch_claims_.get(), F_OFD_SETLK, &range) == 0;
}

void CacheBlob::sync() noexcept {
  const std::lock_guard sync_lock(sync_mutex_);
  if (closed_.load(std::memory_order_acquire) || !may_call_durable_) return;
  std::uint32_t records = 0;
  try {
    const std::lock_guard lock(log_mutex_);
    catch_up_locked();
    records = replay_.records();
    if (!replay_.has_unproven()) return;
  } catch (const std::exception&) {
    failed(sync_failures_, EIO);
    return;
  }
  // Data of every record seen so far, ours and others', was written before its record: this covers it.
  if (::fdatasync(data_.get()) != 0) {
    // The kernel reports an error once and then calls the pages clean, so a later success would prove
    // nothing.
    failed(sync_failures_, errno);
    may_call_durable_ = false;
    return;
  }
  append(cache_log::kDurable, records, 0);
  if (::fdatasync(log_.get()) != 0) {
    failed(sync_failures_, errno);
    may_call_durable_ = false;
  }
}

void CacheBlob::close() noexcept {
  sync();
  if (closed_.exchange(true, std::memory_order_acq_rel)) return;
  lock_.reset();
  fetch_claims_.reset();
}

void CacheBlob::failed(std::atomic<std::uint64_t>& counter, int error) noexcept {
  counter.fetch_add(1, std::memory_order_relaxed);
  last_errno_.store(error, std::memory_order_relaxed);
}

bool CacheBlob::is_refusing() const noexcept {
  const auto until = refusing_until_ns_.load(std::memory_order_relaxed);
  return until != 0 && now_ns() < until;
}

bool CacheBlob::is_complete() const noexcept {
  for (std::uint32_t i = 0; i < map_.count(); ++i) {
    if (!is_ready(i) && claims_[i].load(std::memory_order_acquire) != kProven) return false;
  }
  return true;
}

std::uint64_t CacheBlob::present_bytes() const noexcept {
  std::uint64_t bytes = 0;
  for (std::uint32_t i = 0; i < map_.count(); ++i) {
    if (is_present(i)) bytes += map_.chunk(i).raw_bytes;
  }
  return bytes;
}

CacheStatistics CacheBlob::statistics() const noexcept {
  return {.write_failures = write_failures_,
          .log_failures = log_failures_,
          .sync_failures = sync_failures_,
          .corrupt_chunks = corrupt_chunks_,
          .verified_chunks = verified_chunks_,
          .log_dropped_bytes = log_dropped_bytes_,
          .last_errno = last_errno_};
}

}  // namespace bootseer
