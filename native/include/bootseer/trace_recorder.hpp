// Writes the trace of a running mount. docs/formats/trace.md.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "bootseer/fd.hpp"
#include "bootseer/trace.hpp"

namespace bootseer {

// Thread safe. Recording is an aid: when the file cannot be written it stops and says so in statistics, and
// nobody who reads notices.
class TraceRecorder {
 public:
  // Continues a trace of the same image that is already at `path` (a mount whose process was replaced).
  TraceRecorder(std::string path, std::uint64_t image_bytes);
  ~TraceRecorder();
  TraceRecorder(const TraceRecorder&) = delete;
  TraceRecorder& operator=(const TraceRecorder&) = delete;

  bool is_recording() const noexcept { return recording_.load(std::memory_order_relaxed); }

  // Notes a read unless all its 64 KiB blocks were read before (and `is_new` does not say otherwise). Costs a
  // few nanoseconds after the first use.
  void touch(std::uint64_t offset, std::size_t length, std::uint32_t pid, bool is_new) noexcept;

  // Writes down that the workload is ready, and stops recording.
  void finish() noexcept;

  // Writes what is pending and ends the thread.
  void close() noexcept;

  std::uint64_t records() const noexcept { return records_.load(std::memory_order_relaxed); }
  std::uint64_t lost() const noexcept { return lost_.load(std::memory_order_relaxed); }
  int error() const noexcept { return error_.load(std::memory_order_relaxed); }  // errno that ended it, or 0

 private:
  void open_file();
  bool continue_existing();
  void push(const TraceRecord& record) noexcept;
  void run();
  void write_out(const std::vector<TraceRecord>& batch, bool sync) noexcept;
  std::uint64_t elapsed_ns() const noexcept;

  const std::string path_;
  const std::uint64_t image_bytes_;
  UniqueFd fd_;
  std::vector<std::atomic<std::uint64_t>> touched_;  // one bit per trace block
  std::chrono::steady_clock::time_point opened_;
  std::uint64_t opened_after_ns_ = 0;  // age of the recording when we opened it
  std::atomic<bool> recording_{false};
  std::atomic<std::uint64_t> records_{0};
  std::atomic<std::uint64_t> lost_{0};
  std::atomic<int> error_{0};

  std::mutex mutex_;  // guards the three below
  std::condition_variable changed_;
  std::vector<TraceRecord> pending_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace bootseer
