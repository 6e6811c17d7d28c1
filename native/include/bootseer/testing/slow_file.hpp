// A shipped fake: a file that makes every read wait.
#pragma once

#include <bootseer/read_file.hpp>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace bootseer::testing {

// Has the bytes of `inner`, each read `delay` late. Reads still waiting when it is destroyed get EIO.
class SlowFile final : public ReadFile {
 public:
  SlowFile(std::shared_ptr<ReadFile> inner, std::chrono::nanoseconds delay)
      : inner_(std::move(inner)), delay_(delay), thread_([this] { run(); }) {}
  SlowFile(const SlowFile&) = delete;
  SlowFile& operator=(const SlowFile&) = delete;
  ~SlowFile() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  std::uint64_t size() const noexcept override { return inner_->size(); }
  ssize_t try_read(std::uint64_t, std::size_t, const ReadContext&, std::span<std::byte>,
                   iovec&) noexcept override {
    return -EAGAIN;
  }
  void read(std::uint64_t offset, std::size_t length, const ReadContext& context,
            std::unique_ptr<ReadReply> reply) noexcept override {
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(
          {std::chrono::steady_clock::now() + delay_, offset, length, context, std::move(reply)});
    }
    changed_.notify_all();
  }

 private:
  struct Read {
    std::chrono::steady_clock::time_point due;
    std::uint64_t offset;
    std::size_t length;
    ReadContext context;
    std::unique_ptr<ReadReply> reply;
  };

  void run() {
    std::vector<std::byte> scratch;
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      if (waiting_.empty()) {
        changed_.wait(lock);
        continue;
      }
      if (const auto due = waiting_.front().due; std::chrono::steady_clock::now() < due) {
        changed_.wait_until(lock, due);
        continue;
      }
      const Read read = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      scratch.resize(read.length);
      iovec view{};
      const ssize_t got = inner_->try_read(read.offset, read.length, read.context, scratch, view);
      if (got < 0) {
        read.reply->error(static_cast<int>(-got));
      } else {
        view.iov_len = static_cast<std::size_t>(got);
        read.reply->data({&view, got > 0 ? 1U : 0U});
      }
      lock.lock();
    }
  }

  std::shared_ptr<ReadFile> inner_;
  std::chrono::nanoseconds delay_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Read> waiting_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace bootseer::testing
