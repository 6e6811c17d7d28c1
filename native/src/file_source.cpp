// A local file as origin. Reads happen in two threads of its own, so that fetch() never waits for a disk.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <unordered_set>

#include "bootseer/fd.hpp"
#include "bootseer/source.hpp"

namespace bootseer {
namespace {

constexpr std::size_t kPieceBytes = 256ULL * 1024;
constexpr std::size_t kPriorities = 3;

struct Job {
  Source::Ticket ticket;
  std::uint64_t offset;
  std::uint64_t length;
  std::shared_ptr<FetchSink> sink;
};

class FileSource final : public Source {
 public:
  explicit FileSource(const std::string& path)
      : path_(path), fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (!fd_) {
      if (errno == ENOENT) throw Error(Errc::not_found, "no such file: " + path);
      throw_errno("open " + path);
    }
    struct stat status {};
    if (::fstat(fd_.get(), &status) != 0) throw_errno("stat " + path);
    if (!S_ISREG(status.st_mode)) throw Error(Errc::usage, "not a regular file: " + path);
    for (auto& thread : threads_) thread = std::thread([this] { run(); });
  }

  ~FileSource() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (auto& thread : threads_) thread.join();
    for (auto& queue : queues_) {
      for (auto& job : queue) job.sink->done({Fault::cancelled, "cancelled"});
    }
  }

  Ticket fetch(std::uint64_t offset, std::uint64_t length, Priority priority,
               std::shared_ptr<FetchSink> sink) override {
    const std::lock_guard lock(mutex_);
    const Ticket ticket = ++last_ticket_;
    queues_[static_cast<std::size_t>(priority)].push_back({ticket, offset, length, std::move(sink)});
    changed_.notify_one();
    return ticket;
  }

  void promote(Ticket ticket) noexcept override {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 1; i < kPriorities; ++i) {
      for (auto at = queues_[i].begin(); at != queues_[i].end(); ++at) {
        if (at->ticket != ticket) continue;
        queues_[0].push_back(std::move(*at));
        queues_[i].erase(at);
        return;
      }
    }
  }

  void cancel(Ticket ticket) noexcept override {
    const std::lock_guard lock(mutex_);
    if (ticket <= last_ticket_) cancelled_.insert(ticket);
    changed_.notify_one();
  }

  SourceStatistics statistics() const noexcept override {
    return {.requests = requests_.load(), .retries = 0, .connections = 0, .body_bytes = bytes_.load()};
  }

  std::string describe() const override { return path_; }

 private:
  void run() {
    std::vector<std::byte> buffer(kPieceBytes);
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || next_queue() != nullptr; });
      if (stopping_) return;
      auto& queue = *next_queue();
      const Job job = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      const FetchOutcome outcome = transfer(job, buffer);
      job.sink->done(outcome);
      lock.lock();
      cancelled_.erase(job.ticket);
    }
  }

  std::deque<Job>* next_queue() {
    for (auto& queue : queues_) {
      if (!queue.empty()) return &queue;
    }
    return nullptr;
  }

  bool is_cancelled(Ticket ticket) {
    const std::lock_guard lock(mutex_);
    return stopping_ || cancelled_.contains(ticket);
  }

  FetchOutcome transfer(const Job& job, std::span<std::byte> buffer) {
    requests_.fetch_add(1);
    std::uint64_t moved = 0;
    while (moved < job.length) {
      if (is_cancelled(job.ticket)) return {Fault::cancelled, "cancelled"};
      const auto want = static_cast<std::size_t>(std::min<std::uint64_t>(buffer.size(), job.length - moved));
      const ssize_t got = ::pread(fd_.get(), buffer.data(), want, static_cast<off_t>(job.offset + moved));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return {Fault::local_io, path_ + ": " + std::strerror(errno)};
      if (got == 0) return {Fault::short_body, path_ + ": file ends before the range does"};
      bytes_.fetch_add(static_cast<std::uint64_t>(got));
      moved += static_cast<std::uint64_t>(got);
      if (!job.sink->data(buffer.first(static_cast<std::size_t>(got))))
        return {Fault::cancelled, "cancelled"};
    }
    return {};
  }

  const std::string path_;
  const UniqueFd fd_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<std::deque<Job>, kPriorities> queues_;
  std::unordered_set<Ticket> cancelled_;
  Ticket last_ticket_ = 0;
  bool stopping_ = false;
  std::atomic<std::uint64_t> requests_{0};
  std::atomic<std::uint64_t> bytes_{0};
  std::array<std::thread, 2> threads_;
};

}  // namespace

std::shared_ptr<Source> make_file_source(const std::string& path) {
  return std::make_shared<FileSource>(path);
}

}  // namespace bootseer
