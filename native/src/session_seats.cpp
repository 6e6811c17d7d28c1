#include <bootseer/session_seats.hpp>

namespace bootseer {

bool Seats::take() {
  std::unique_lock lock(mutex_);
  freed_.wait(lock, [this] { return shut_ || taken_ < seats_; });
  if (shut_) return false;
  taken_ = taken_ + 1;
  return true;
}

void Seats::give() {
  {
    const std::lock_guard lock(mutex_);
    taken_ = taken_ - 1;
  }
  freed_.notify_one();
}

bool Seats::note(Clock::time_point began, Clock::time_point ended) {
  const auto nanoseconds = [](auto duration) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
  };
  if (ended - began > kSlow) {
    until_.store(nanoseconds((ended + kWhile).time_since_epoch()), std::memory_order_relaxed);
    if (seats_.load(std::memory_order_relaxed) != all_) resize(all_);
  } else if (seats_.load(std::memory_order_relaxed) != few_ &&
             nanoseconds(ended.time_since_epoch()) > until_.load(std::memory_order_relaxed)) {
    resize(few_);
  }
  return taken_.load(std::memory_order_relaxed) <= seats_.load(std::memory_order_relaxed);
}

void Seats::resize(unsigned seats) {
  {
    const std::lock_guard lock(mutex_);
    seats_ = seats;
  }
  freed_.notify_all();
}

void Seats::shut() {
  {
    const std::lock_guard lock(mutex_);
    shut_ = true;
  }
  freed_.notify_all();
}

}  // namespace bootseer
