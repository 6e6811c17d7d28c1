// Brings missing chunks: for reads that wait, for the plan, and for the rest when nothing else is to do.
// native/CONCURRENCY.md has the threads, the locks and the invariants.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "bootseer/cache_blob.hpp"
#include "bootseer/chunk_map.hpp"
#include "bootseer/error.hpp"
#include "bootseer/frame_index.hpp"
#include "bootseer/memory_chunks.hpp"
#include "bootseer/pacer.hpp"
#include "bootseer/read_file.hpp"
#include "bootseer/request_planner.hpp"
#include "bootseer/source.hpp"
#include "bootseer/statistics.hpp"
#include "bootseer/trace.hpp"

namespace bootseer {

struct FetcherOptions {
  std::chrono::nanoseconds deadline = std::chrono::seconds(30);  // of a read that waits
  bool background_fill = true;
  std::chrono::nanoseconds idle_before_background = std::chrono::seconds(3);
  unsigned decode_threads = 2;
};

// Why a read failed, for callers that want more than an errno.
struct ReadFailure {
  Errc code = Errc::internal;
  std::string message;
};

class Fetcher {
 public:
  // All three must outlive this object; the source may be shared with others.
  Fetcher(const ChunkMap& map, CacheBlob& blob, Source& source, const FetcherOptions& options);
  ~Fetcher();
  Fetcher(const Fetcher&) = delete;
  Fetcher& operator=(const Fetcher&) = delete;

  // Answers [offset, offset + length), which lies inside the image and is not empty, when its bytes are
  // there. `failure`, when given, is filled before reply->error().
  void read(std::uint64_t offset, std::size_t length, std::unique_ptr<ReadReply> reply,
            std::shared_ptr<ReadFailure> failure) noexcept;

  void set_plan(std::span<const PlanEntry> plan);
  // The workload is ready: what is left may be filled now.
  void start_background() noexcept;

  // Notes that a read touched the chunk. True the first time.
  bool touch(std::uint32_t chunk) noexcept;

  // Fails what waits, cancels what is in flight, joins the threads.
  void close() noexcept;

  void add_statistics(Statistics& out) const;

 private:
  using Clock = std::chrono::steady_clock;
  class Request;

  // How a chunk came, for coverage and precision.
  enum class Origin : std::uint8_t { local, demand, prefetch, read_ahead, background };

  struct PendingRead {
    std::uint64_t offset = 0;
    std::size_t length = 0;
    std::unique_ptr<ReadReply> reply;
    std::shared_ptr<ReadFailure> failure;
    std::unique_ptr<std::byte[]> buffer;
    std::vector<std::uint32_t> local;  // chunks to read from disk in the end
    std::uint32_t missing = 0;
    bool is_parked = false;
    bool is_finished = false;
    bool met_prefetch = false;
    Clock::time_point arrived;
    std::list<std::shared_ptr<PendingRead>>::iterator place;  // in parked_
  };
  using Pending = std::shared_ptr<PendingRead>;
  struct Waiter {
    Pending read;
    std::uint32_t chunk;
  };

  // A frame that is not here but on its way.
  struct Active {
    enum class Stage : std::uint8_t { queued, elsewhere, in_flight, decoding };  // elsewhere: another process
    Stage stage = Stage::queued;
    Origin origin = Origin::demand;
    bool is_claimed = false;  // other processes know that we fetch it
    Clock::time_point elsewhere_since{};
    unsigned attempts = 0;  // that brought wrong bytes
    Source::Ticket ticket = 0;
    std::vector<Waiter> waiters;
  };

  struct DecodeJob {
    std::uint32_t frame;
    std::unique_ptr<std::byte[]> blob;  // null: another process has brought it, look in the cache
  };
  using ActiveFrames = std::unordered_map<std::uint32_t, Active>;

  struct Reason {  // of an error: the name is the statistics key
    const char* name;
    Errc code;
    std::string message;

    int errno_value() const noexcept { return code == Errc::timeout ? ETIMEDOUT : EIO; }
  };

  // Reads
  void start(const Pending& read);
  void park_locked(const Pending& read);
  bool find_local(std::uint32_t chunk) noexcept;
  bool copy_from_twin(std::uint32_t chunk) noexcept;
  bool attach_locked(const Pending& read, std::uint32_t chunk);  // true: nobody had asked for it
  void read_ahead_locked(std::uint32_t first_chunk, std::uint32_t last_chunk);
  void finish(const Pending& read);
  static void fail(const std::vector<Pending>& reads, const Reason& reason) noexcept;
  void deliver(const std::vector<Waiter>& waiters, std::span<const std::byte> raw);
  void unpark_locked(PendingRead& read);
  static void copy_part(PendingRead& read, const Chunk& chunk, std::span<const std::byte> raw);

  // Requests
  void pump_locked();
  void pump_demand_locked();
  void pump_prefetch_locked();
  void pump_background_locked();
  void issue_locked(const RangePlan& range, Priority priority, Origin origin);
  void issue_claimed_locked(const RangePlan& range, Priority priority);
  bool has_member_locked(std::uint32_t frame) const;
  void queue_decode_locked(std::uint32_t frame, Active& active, std::unique_ptr<std::byte[]> blob);
  void poll_elsewhere_locked();
  void retire_locked(ActiveFrames::iterator at);
  bool is_wanted_locked(std::uint32_t frame) const;
  void first_byte_came(Clock::time_point issued);
  void frame_arrived(Request& request, std::uint32_t frame, std::unique_ptr<std::byte[]> blob);
  void request_ended(Request& request, const FetchOutcome& outcome);

  // Decoding
  void decode_loop();
  void take_from_cache(const DecodeJob& job);
  void frame_is_wrong(const DecodeJob& job, const char* name);
  void frame_is_right(const DecodeJob& job, std::span<const std::byte> raw);

  void timer_loop();
  void expire(std::unique_lock<std::mutex>& lock);
  void copy_twins();
  void note_error_locked(const Reason& reason);
  std::vector<Pending> take_reads_locked(const std::vector<Waiter>& waiters);

  const ChunkMap& map_;
  CacheBlob& blob_;
  Source& source_;
  const FetcherOptions options_;
  const FrameIndex frames_;
  std::vector<std::atomic<std::uint64_t>> touched_;
  std::vector<std::atomic<Origin>> origins_;

  mutable std::mutex mutex_;  // guards everything down to the threads
  std::condition_variable decode_wanted_;
  std::condition_variable timer_wanted_;
  std::condition_variable quiet_;
  bool closing_ = false;
  ActiveFrames active_;
  std::vector<std::uint32_t> elsewhere_;  // frames in that stage
  std::list<Pending> parked_;             // oldest first, and so by deadline
  std::vector<std::uint32_t> demand_queue_;
  RequestPlanner planner_;
  std::vector<bool> planned_chunks_;
  Pacer pacer_;
  MemoryChunks memory_;  // what the disk refused
  std::deque<DecodeJob> decode_demand_;
  std::deque<DecodeJob> decode_other_;
  std::uint64_t decode_backlog_bytes_ = 0;
  std::uint64_t prefetch_in_flight_bytes_ = 0;
  unsigned prefetch_requests_in_flight_ = 0;
  unsigned demand_requests_in_flight_ = 0;
  unsigned background_requests_in_flight_ = 0;
  unsigned requests_in_flight_ = 0;  // of all kinds, until done()
  unsigned prefetch_failures_ = 0;   // in a row
  Clock::time_point prefetch_paused_until_{};
  Clock::time_point last_demand_;
  bool background_at_once_ = false;
  bool twins_are_copied_ = false;
  struct Stream {
    std::uint32_t next_chunk = 0xfffffff0;  // far from any chunk
    std::uint32_t run = 0;
    std::uint64_t used = 0;
  };
  std::array<Stream, 8> streams_{};
  std::uint64_t stream_clock_ = 0;

  struct Counters {
    std::uint64_t demand_requests = 0, prefetch_requests = 0, background_requests = 0;
    std::uint64_t demand_bytes = 0, prefetch_bytes = 0, read_ahead_bytes = 0, background_bytes = 0;
    std::uint64_t wasted_bytes = 0, decoded_bytes = 0, integrity_retries = 0, local_read_failures = 0;
    std::uint64_t stalls = 0, stall_ns = 0, stall_max_ns = 0, late_queued = 0;
    std::uint64_t prefetched_chunks = 0;
    std::uint64_t served_from_memory = 0;
    std::uint64_t elsewhere_bytes = 0;
  };
  Counters counters_;
  Samples lateness_ns_;
  Samples stalls_ns_;
  std::map<std::string, std::uint64_t> errors_;
  std::string last_error_;

  std::atomic<std::uint64_t> touched_chunks_{0};
  std::atomic<std::uint64_t> touched_local_{0};
  std::atomic<std::uint64_t> touched_prefetched_{0};
  std::atomic<std::uint64_t> touched_late_{0};  // prefetch still under way

  std::vector<std::thread> threads_;
};

}  // namespace bootseer
