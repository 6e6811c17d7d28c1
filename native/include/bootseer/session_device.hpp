// The kernel's side of a session: writes answers to the device and knows which requests are still unanswered.
#pragma once

#include <array>
#include <atomic>
#include <bootseer/fd.hpp>
#include <bootseer/read_file.hpp>
#include <bootseer/session_state.hpp>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

namespace bootseer {

// A READ that is too large for one control message and is asked of the control peer piece by piece.
struct SplitRead {
  std::vector<std::byte> request;  // header + ReadIn as the kernel sent it
  std::vector<std::byte> collected;
};

// A request that was read from the device and not answered yet.
struct Pending {
  enum class Where { file, control };
  Where where = Where::control;
  std::uint32_t opcode = 0;
  std::uint32_t pid = 0;
  std::uint64_t nodeid = 0;
  int slot = Journal::kNoSlot;
  bool interrupted = false;
  std::shared_ptr<SplitRead> split;
};

struct DeviceCounters {
  std::atomic<std::uint64_t> replies_unwanted{0};  // the kernel had given up on the request (ENOENT)
  std::atomic<std::uint64_t> reply_failures{0};    // any other error of write(2)
  std::atomic<std::uint64_t> interrupts{0};        // INTERRUPT requests seen
  std::atomic<std::uint64_t> interrupted_reads{
      0};  // reads answered EINTR because their reader is being killed
  std::atomic<std::uint64_t> read_errors{0};
  std::atomic<std::uint64_t> late_bytes{0};  // bytes of reads that had to wait
};

// Shared by the session and by every read that a file has yet to answer, so that such an answer may come
// after the session has stopped.
class Device : public std::enable_shared_from_this<Device> {
 public:
  Device(UniqueFd fd, std::shared_ptr<Journal> journal) : fd_(std::move(fd)), journal_(std::move(journal)) {}

  int fd() const noexcept { return fd_.get(); }
  Journal* journal() const noexcept { return journal_.get(); }
  DeviceCounters& counters() noexcept { return counters_; }

  // Writes one answer. Returns 0 or the errno of write(2). `error` is 0 or a positive errno.
  int answer(std::uint64_t unique, int error, std::span<const iovec> parts) noexcept;
  // Writes a complete message (an answer or a notification) as it is.
  int write_message(std::span<const std::byte> message) noexcept;

  // Registers a request as unanswered. Returns true when an INTERRUPT for it came before.
  bool add(std::uint64_t unique, Pending pending);
  // Takes a request off the list; the caller answers it and then calls done() with its slot.
  std::optional<Pending> take(std::uint64_t unique) noexcept;
  void done(const Pending& pending) noexcept;
  std::size_t pending() const noexcept;
  std::size_t parked() const noexcept;

  // Handles an INTERRUPT for `unique`. Returns true when it concerns the control peer.
  bool interrupt(std::uint64_t unique);
  // Answers EINTR to interrupted reads whose reader is being killed. Returns how many interrupted reads
  // remain.
  std::size_t reap_interrupted() noexcept;

  // Registers a READ as waiting for its file and returns the object that will answer it.
  std::unique_ptr<ReadReply> park(std::uint64_t unique, std::uint64_t nodeid, std::uint32_t pid, int slot);

 private:
  static constexpr std::size_t kEarlyInterrupts = 256;

  int count_failure(int error) noexcept;  // returns the error

  UniqueFd fd_;
  std::shared_ptr<Journal> journal_;
  DeviceCounters counters_;
  mutable std::mutex mutex_;
  std::unordered_map<std::uint64_t, Pending> pending_;
  std::size_t parked_ = 0;
  // INTERRUPTs that overtook their request on another thread; most belong to requests already answered.
  std::deque<std::uint64_t> early_interrupts_;
};

}  // namespace bootseer
