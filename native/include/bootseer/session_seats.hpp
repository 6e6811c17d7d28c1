// How many reader threads wait for requests at a time.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace bootseer {

// A thread needs a seat to wait for requests. It keeps it while it answers small reads from memory, and gives
// it up for anything that takes longer, so that another one waits meanwhile.
//
// Few seats are faster than many: the kernel wakes the waiting thread that has slept longest, which costs a
// context switch per request, where a single one finds the next request already there. But should small reads
// turn out slow (they come from disk, or are verified first), there is a seat for every thread for a while.
class Seats {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kSlow = std::chrono::microseconds(300);
  static constexpr auto kWhile = std::chrono::milliseconds(20);

  Seats(unsigned few, unsigned all) : few_(few), all_(all), seats_(few) {}

  // Waits for a seat; false once shut.
  bool take();
  void give();
  // Takes note of how long a small read took; call with a seat. Returns false when the seat has to be given
  // up, because there are fewer now.
  bool note(Clock::time_point began, Clock::time_point ended);
  // Nobody waits any more.
  void shut();
  unsigned seats() const noexcept { return seats_.load(std::memory_order_relaxed); }

 private:
  void resize(unsigned seats);

  const unsigned few_;
  const unsigned all_;
  std::mutex mutex_;
  std::condition_variable freed_;
  bool shut_ = false;
  std::atomic<unsigned> seats_;         // changed under the mutex
  std::atomic<unsigned> taken_{0};      // changed under the mutex
  std::atomic<std::int64_t> until_{0};  // steady clock, ns: when all_ becomes few_ again
};

}  // namespace bootseer
