#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <bootseer/fuse_abi.hpp>
#include <bootseer/session_device.hpp>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <utility>

namespace bootseer {
namespace {

// Whether the thread is on its way out: a thread that waits for a FUSE answer and has been killed stays in
// the kernel, with SIGKILL pending, until the answer comes. (Any fatal signal shows up as SIGKILL there.)
bool is_dying(std::uint32_t pid) noexcept {
  if (pid == 0) return false;  // not visible in our PID namespace: we cannot know
  std::array<char, 64> path{};
  std::snprintf(path.data(), path.size(), "/proc/%u/status", pid);
  UniqueFd fd(::open(path.data(), O_RDONLY | O_CLOEXEC));
  if (!fd) return errno == ENOENT;
  std::array<char, 4096> text{};
  const ssize_t got = ::read(fd.get(), text.data(), text.size());
  if (got <= 0) return true;  // it went away in between
  const std::string_view status(text.data(), static_cast<std::size_t>(got));
  constexpr std::string_view kLabel = "\nSigPnd:\t";
  const auto at = status.find(kLabel);
  if (at == std::string_view::npos) return false;
  std::uint64_t signals = 0;
  const char* first = status.data() + at + kLabel.size();
  std::from_chars(first, status.data() + status.size(), signals, 16);
  constexpr std::uint64_t kSigkill = 1ULL << (9 - 1);
  return (signals & kSigkill) != 0;
}

class ParkedRead final : public ReadReply {
 public:
  ParkedRead(std::shared_ptr<Device> device, std::uint64_t unique)
      : device_(std::move(device)), unique_(unique) {}
  ParkedRead(const ParkedRead&) = delete;
  ParkedRead& operator=(const ParkedRead&) = delete;
  // A file that drops a read without an answer must not leave its reader waiting.
  ~ParkedRead() override { finish(EIO, {}); }

  void data(std::span<const iovec> parts) noexcept override { finish(0, parts); }
  void error(int errno_value) noexcept override { finish(errno_value, {}); }

 private:
  void finish(int error, std::span<const iovec> parts) noexcept {
    if (answered_) return;
    answered_ = true;
    // Gone when the reader was killed meanwhile and has its EINTR.
    const auto pending = device_->take(unique_);
    if (!pending) return;
    if (error != 0) {
      device_->counters().read_errors.fetch_add(1, std::memory_order_relaxed);
    } else {
      std::size_t bytes = 0;
      for (const auto& part : parts) bytes += part.iov_len;
      device_->counters().late_bytes.fetch_add(bytes, std::memory_order_relaxed);
    }
    device_->answer(unique_, error, parts);
    device_->done(*pending);
  }

  std::shared_ptr<Device> device_;
  std::uint64_t unique_;
  bool answered_ = false;
};

}  // namespace

int Device::answer(std::uint64_t unique, int error, std::span<const iovec> parts) noexcept {
  constexpr std::size_t kInline = 16;
  std::array<iovec, kInline> inline_vector;
  std::vector<iovec> long_vector;
  iovec* vector = inline_vector.data();
  if (parts.size() + 1 > kInline) {
    try {
      long_vector.resize(parts.size() + 1);
      vector = long_vector.data();
    } catch (const std::bad_alloc&) {
      parts = {};
      error = ENOMEM;
    }
  }
  std::size_t bytes = sizeof(fuse::OutHeader);
  for (const auto& part : parts) bytes += part.iov_len;
  fuse::OutHeader header{static_cast<std::uint32_t>(bytes), -error, unique};
  vector[0] = {&header, sizeof(header)};
  std::copy(parts.begin(), parts.end(), vector + 1);
  ssize_t put = 0;
  do {
    put = ::writev(fd_.get(), vector, static_cast<int>(parts.size() + 1));
  } while (put < 0 && errno == EINTR);
  return put >= 0 ? 0 : count_failure(errno);
}

int Device::count_failure(int error) noexcept {
  auto& counter = error == ENOENT ? counters_.replies_unwanted : counters_.reply_failures;
  counter.fetch_add(1, std::memory_order_relaxed);
  return error;
}

int Device::write_message(std::span<const std::byte> message) noexcept {
  ssize_t put = 0;
  do {
    put = ::write(fd_.get(), message.data(), message.size());
  } while (put < 0 && errno == EINTR);
  return put >= 0 ? 0 : count_failure(errno);
}

bool Device::add(std::uint64_t unique, Pending pending) {
  const std::lock_guard lock(mutex_);
  const auto early = std::find(early_interrupts_.begin(), early_interrupts_.end(), unique);
  const bool interrupted = early != early_interrupts_.end();
  if (interrupted) early_interrupts_.erase(early);
  pending.interrupted = interrupted;
  if (pending.where == Pending::Where::file) ++parked_;
  pending_.insert_or_assign(unique, std::move(pending));
  return interrupted;
}

std::optional<Pending> Device::take(std::uint64_t unique) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = pending_.find(unique);
  if (found == pending_.end()) return std::nullopt;
  Pending pending = std::move(found->second);
  pending_.erase(found);
  if (pending.where == Pending::Where::file) --parked_;
  return pending;
}

void Device::done(const Pending& pending) noexcept {
  if (journal_) journal_->release(pending.slot);
}

std::size_t Device::pending() const noexcept {
  const std::lock_guard lock(mutex_);
  return pending_.size();
}

std::size_t Device::parked() const noexcept {
  const std::lock_guard lock(mutex_);
  return parked_;
}

bool Device::interrupt(std::uint64_t unique) {
  counters_.interrupts.fetch_add(1, std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  const auto found = pending_.find(unique);
  if (found == pending_.end()) {
    early_interrupts_.push_back(unique);
    if (early_interrupts_.size() > kEarlyInterrupts) early_interrupts_.pop_front();
    return false;
  }
  found->second.interrupted = true;
  return found->second.where == Pending::Where::control;
}

std::size_t Device::reap_interrupted() noexcept {
  std::size_t remaining = 0;
  std::vector<std::pair<std::uint64_t, Pending>> dying;
  try {
    const std::lock_guard lock(mutex_);
    for (auto entry = pending_.begin(); entry != pending_.end();) {
      auto& pending = entry->second;
      if (pending.where != Pending::Where::file || !pending.interrupted) {
        ++entry;
      } else if (is_dying(pending.pid)) {
        dying.emplace_back(entry->first, pending);
        entry = pending_.erase(entry);
        --parked_;
      } else {
        ++remaining;
        ++entry;
      }
    }
  } catch (const std::bad_alloc&) {
    ++remaining;  // try again later
  }
  for (const auto& [unique, pending] : dying) {
    counters_.interrupted_reads.fetch_add(1, std::memory_order_relaxed);
    answer(unique, EINTR, {});
    done(pending);
  }
  return remaining;
}

std::unique_ptr<ReadReply> Device::park(std::uint64_t unique, std::uint64_t nodeid, std::uint32_t pid,
                                        int slot) {
  auto reply = std::make_unique<ParkedRead>(shared_from_this(), unique);
  Pending pending;
  pending.where = Pending::Where::file;
  pending.opcode = fuse::kRead;
  pending.pid = pid;
  pending.nodeid = nodeid;
  pending.slot = slot;
  add(unique, std::move(pending));
  return reply;
}

}  // namespace bootseer
