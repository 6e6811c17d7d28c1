// An origin in memory that can be slow, stop, fail and lie.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "bootseer/source.hpp"

namespace bootseer {

struct FakeFaults {
  double fail = 0;  // probability that a fetch ends early with a reset
  double lie = 0;   // probability that one delivered byte is wrong
  std::size_t piece_bytes = 16 * 1024;
};

class FakeSource final : public Source {
 public:
  using Faults = FakeFaults;
  struct Call {
    std::uint64_t offset;
    std::uint64_t length;
    Priority priority;
  };

  explicit FakeSource(std::vector<std::byte> content, Faults faults = {}, unsigned seed = 1)
      : content_(std::move(content)), faults_(faults), random_(seed), thread_([this] { run(); }) {}

  ~FakeSource() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  Ticket fetch(std::uint64_t offset, std::uint64_t length, Priority priority,
               std::shared_ptr<FetchSink> sink) override {
    const std::lock_guard lock(mutex_);
    calls_.push_back({offset, length, priority});
    jobs_.push_back({++last_ticket_, offset, length, std::move(sink)});
    changed_.notify_all();
    return last_ticket_;
  }

  void promote(Ticket ticket) noexcept override {
    const std::lock_guard lock(mutex_);
    promoted_.insert(ticket);
  }

  void cancel(Ticket ticket) noexcept override {
    const std::lock_guard lock(mutex_);
    cancelled_.insert(ticket);
    changed_.notify_all();
  }

  SourceStatistics statistics() const noexcept override { return {}; }
  std::string describe() const override { return "fake"; }

  // Nothing is answered while held.
  void hold(bool held) {
    const std::lock_guard lock(mutex_);
    held_ = held;
    changed_.notify_all();
  }
  void set_faults(Faults faults) {
    const std::lock_guard lock(mutex_);
    faults_ = faults;
  }
  std::vector<Call> calls() const {
    const std::lock_guard lock(mutex_);
    return calls_;
  }
  std::size_t promotions() const {
    const std::lock_guard lock(mutex_);
    return promoted_.size();
  }

 private:
  struct Job {
    Ticket ticket;
    std::uint64_t offset;
    std::uint64_t length;
    std::shared_ptr<FetchSink> sink;
  };

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || find_job() != jobs_.end(); });
      if (stopping_) break;
      const auto at = find_job();
      const Job job = std::move(*at);
      jobs_.erase(at);
      const bool is_cancelled = cancelled_.contains(job.ticket);
      const bool fails = chance(faults_.fail);
      const bool lies = chance(faults_.lie);
      const auto bad_byte = job.length == 0 ? 0 : random_() % job.length;
      const std::size_t piece = std::max<std::size_t>(1, random_() % faults_.piece_bytes);
      lock.unlock();
      if (is_cancelled) {
        job.sink->done({Fault::cancelled, "cancelled"});
      } else {
        answer(job, fails, lies, bad_byte, piece);
      }
      lock.lock();
    }
    for (auto& job : jobs_) job.sink->done({Fault::cancelled, "cancelled"});
  }

  // While held only cancelled jobs are taken.
  std::deque<Job>::iterator find_job() {
    return std::find_if(jobs_.begin(), jobs_.end(),
                        [this](const Job& job) { return !held_ || cancelled_.contains(job.ticket); });
  }

  bool chance(double p) { return std::uniform_real_distribution<double>(0, 1)(random_) < p; }

  void answer(const Job& job, bool fails, bool lies, std::uint64_t bad_byte, std::size_t piece) {
    std::vector<std::byte> bytes(content_.begin() + static_cast<std::ptrdiff_t>(job.offset),
                                 content_.begin() + static_cast<std::ptrdiff_t>(job.offset + job.length));
    if (lies) bytes[bad_byte] ^= std::byte{0x40};
    const std::size_t end = fails ? bytes.size() / 2 : bytes.size();
    for (std::size_t at = 0; at < end; at += piece) {
      if (!job.sink->data(std::span(bytes).subspan(at, std::min(piece, end - at)))) {
        job.sink->done({Fault::cancelled, "cancelled"});
        return;
      }
    }
    job.sink->done(fails ? FetchOutcome{Fault::reset, "fake: reset"} : FetchOutcome{});
  }

  const std::vector<std::byte> content_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Faults faults_;
  std::minstd_rand random_;
  std::deque<Job> jobs_;
  std::vector<Call> calls_;
  std::set<Ticket> promoted_;
  std::set<Ticket> cancelled_;
  Ticket last_ticket_ = 0;
  bool held_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace bootseer
