// Reads that wait, decoding, deadlines. What is asked for and when: fetcher_requests.cpp.
#include "bootseer/fetcher.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cstring>

#include "bootseer/frame_decoder.hpp"

namespace bootseer {
namespace {

constexpr std::size_t kMaxMemoryBytes = 64ULL * 1024 * 1024;
constexpr unsigned kMaxIntegrityAttempts = 3;
constexpr auto kTick = std::chrono::milliseconds(200);
constexpr auto kElsewhereTick = std::chrono::milliseconds(3);

std::uint64_t to_ns(std::chrono::nanoseconds duration) {
  return static_cast<std::uint64_t>(std::max<std::int64_t>(duration.count(), 0));
}

double ratio(std::uint64_t part, std::uint64_t whole) {
  return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
}

}  // namespace

Fetcher::Fetcher(const ChunkMap& map, CacheBlob& blob, Source& source, const FetcherOptions& options)
    : map_(map),
      blob_(blob),
      source_(source),
      options_(options),
      frames_(map),
      touched_((map.count() + 63) / 64),
      origins_(map.count()),
      planner_(frames_),
      planned_chunks_(map.count()),
      memory_(kMaxMemoryBytes),
      last_demand_(Clock::now()) {
  for (unsigned i = 0; i < std::max(1U, options_.decode_threads); ++i) {
    threads_.emplace_back([this] { decode_loop(); });
  }
  threads_.emplace_back([this] { timer_loop(); });
}

Fetcher::~Fetcher() {
  close();
}

// ---- reads ----

void Fetcher::read(std::uint64_t offset, std::size_t length, std::unique_ptr<ReadReply> reply,
                   std::shared_ptr<ReadFailure> failure) noexcept {
  ReadReply* const plain = reply.get();
  try {
    const auto read = std::make_shared<PendingRead>();
    read->offset = offset;
    read->length = length;
    read->buffer = std::make_unique_for_overwrite<std::byte[]>(length);
    read->failure = std::move(failure);
    read->arrived = Clock::now();
    read->reply = std::move(reply);
    start(read);
  } catch (const std::bad_alloc&) {
    // Only the allocations above can fail here while we still own the reply.
    if (reply) plain->error(ENOMEM);
  }
}

void Fetcher::start(const Pending& read) {
  const std::uint32_t first = map_.index_of(read->offset);
  const std::uint32_t last = map_.index_of(read->offset + read->length - 1);
  std::vector<std::uint32_t> missing;
  read->local.clear();
  for (std::uint32_t chunk = first; chunk <= last; ++chunk) {
    (find_local(chunk) ? read->local : missing).push_back(chunk);
  }
  if (!missing.empty() && blob_.refresh()) {
    std::erase_if(missing, [&](std::uint32_t chunk) {
      const bool is_local = find_local(chunk);
      if (is_local) read->local.push_back(chunk);
      return is_local;
    });
  }
  std::unique_lock lock(mutex_);
  read->missing = 0;
  read->is_finished = false;
  if (closing_) {
    read->is_finished = true;
    lock.unlock();
    fail({read}, {"closed", Errc::backend, "the file is closed"});
    return;
  }
  bool is_new_miss = false;
  for (const std::uint32_t chunk : missing) {
    if (const auto kept = memory_.find(chunk)) {
      copy_part(*read, map_.chunk(chunk), *kept);
      ++counters_.served_from_memory;
    } else if (blob_.is_ready(chunk)) {  // arrived since we looked
      read->local.push_back(chunk);
    } else {
      is_new_miss = attach_locked(read, chunk) || is_new_miss;
    }
  }
  if (read->missing > 0) {
    park_locked(read);
    if (is_new_miss) read_ahead_locked(first, last);
    pump_locked();
    return;
  }
  read->is_finished = true;
  lock.unlock();
  finish(read);
}

bool Fetcher::find_local(std::uint32_t chunk) noexcept {
  return blob_.is_ready(chunk) || blob_.prove(chunk) || copy_from_twin(chunk);
}

// Another chunk with the same content may be here already.
bool Fetcher::copy_from_twin(std::uint32_t chunk) noexcept {
  const std::uint32_t frame = frames_.of(chunk);
  if (frame == FrameIndex::kNone || frames_[frame].member_count < 2) return false;
  try {
    for (const std::uint32_t twin : frames_.members(frame)) {
      if (twin == chunk || !(blob_.is_ready(twin) || blob_.prove(twin))) continue;
      const Chunk& entry = map_.chunk(twin);
      std::vector<std::byte> raw(entry.raw_bytes);
      if (!blob_.read(entry.raw_offset, raw) || sha256(raw) != entry.sha256) {
        blob_.drop(twin);
        continue;
      }
      origins_[chunk].store(origins_[twin].load(std::memory_order_relaxed), std::memory_order_relaxed);
      return blob_.put(chunk, raw);
    }
  } catch (const std::exception&) {
    return false;  // out of memory: fetch it
  }
  return false;
}

bool Fetcher::attach_locked(const Pending& read, std::uint32_t chunk) {
  const std::uint32_t frame = frames_.of(chunk);
  auto [at, is_new] = active_.try_emplace(frame);
  Active& active = at->second;
  active.waiters.push_back({read, chunk});
  ++read->missing;
  if (is_new) {
    demand_queue_.push_back(frame);
    if (planner_.is_planned(frame)) {
      read->met_prefetch = true;
      ++counters_.late_queued;
    }
    return true;
  }
  if (active.origin == Origin::prefetch) read->met_prefetch = true;
  if (active.origin == Origin::demand) return false;
  if (active.stage == Active::Stage::in_flight) source_.promote(active.ticket);
  if (active.stage == Active::Stage::decoding) {
    const auto job = std::find_if(decode_other_.begin(), decode_other_.end(),
                                  [frame](const DecodeJob& other) { return other.frame == frame; });
    if (job != decode_other_.end()) {
      decode_demand_.push_back(std::move(*job));
      decode_other_.erase(job);
    }
  }
  return false;
}

void Fetcher::park_locked(const Pending& read) {
  last_demand_ = Clock::now();
  const bool timer_sleeps = parked_.empty();
  // A read that comes back (its local part proved unreadable) is the older one.
  const bool is_back = read->is_parked;
  read->place = parked_.insert(is_back ? parked_.begin() : parked_.end(), read);
  read->is_parked = true;
  if (timer_sleeps) timer_wanted_.notify_one();
}

void Fetcher::unpark_locked(PendingRead& read) {
  parked_.erase(read.place);
  const std::uint64_t waited_ns = to_ns(Clock::now() - read.arrived);
  ++counters_.stalls;
  counters_.stall_ns += waited_ns;
  counters_.stall_max_ns = std::max(counters_.stall_max_ns, waited_ns);
  stalls_ns_.add(waited_ns);
  if (read.met_prefetch) lateness_ns_.add(waited_ns);
}

void Fetcher::copy_part(PendingRead& read, const Chunk& chunk, std::span<const std::byte> raw) {
  const std::uint64_t from = std::max(read.offset, chunk.raw_offset);
  const std::uint64_t to = std::min(read.offset + read.length, chunk.raw_offset + chunk.raw_bytes);
  std::memcpy(read.buffer.get() + (from - read.offset), raw.data() + (from - chunk.raw_offset),
              static_cast<std::size_t>(to - from));
}

// Hands the raw bytes of a chunk to the reads that wait for it.
void Fetcher::deliver(const std::vector<Waiter>& waiters, std::span<const std::byte> raw) {
  if (waiters.empty()) return;
  for (const Waiter& waiter : waiters) copy_part(*waiter.read, map_.chunk(waiter.chunk), raw);
  std::vector<Pending> complete;
  {
    const std::lock_guard lock(mutex_);
    for (const Waiter& waiter : waiters) {
      if (--waiter.read->missing > 0 || waiter.read->is_finished) continue;
      waiter.read->is_finished = true;
      unpark_locked(*waiter.read);
      complete.push_back(waiter.read);
    }
  }
  for (const Pending& read : complete) finish(read);
}

// Everything is in the buffer or on disk.
void Fetcher::finish(const Pending& read) {
  for (const std::uint32_t index : read->local) {
    const Chunk& chunk = map_.chunk(index);
    const std::uint64_t from = std::max(read->offset, chunk.raw_offset);
    const std::uint64_t to = std::min(read->offset + read->length, chunk.raw_offset + chunk.raw_bytes);
    const auto part =
        std::span(read->buffer.get() + (from - read->offset), static_cast<std::size_t>(to - from));
    if (chunk.is_zeros()) {
      std::memset(part.data(), 0, part.size());
    } else if (!blob_.read(from, part)) {
      blob_.drop(index);
      {
        const std::lock_guard lock(mutex_);
        ++counters_.local_read_failures;
      }
      start(read);
      return;
    }
  }
  const iovec view{read->buffer.get(), read->length};
  read->reply->data(std::span(&view, 1));
  read->reply.reset();
}

void Fetcher::fail(const std::vector<Pending>& reads, const Reason& reason) noexcept {
  for (const Pending& read : reads) {
    if (read->failure) *read->failure = {reason.code, reason.message};
    read->reply->error(reason.errno_value());
    read->reply.reset();
  }
}

// The unfinished reads among the waiters, now finished: the caller answers them.
std::vector<Fetcher::Pending> Fetcher::take_reads_locked(const std::vector<Waiter>& waiters) {
  std::vector<Pending> reads;
  for (const Waiter& waiter : waiters) {
    if (waiter.read->is_finished) continue;
    waiter.read->is_finished = true;
    unpark_locked(*waiter.read);
    reads.push_back(waiter.read);
  }
  return reads;
}

bool Fetcher::touch(std::uint32_t chunk) noexcept {
  auto& word = touched_[chunk / 64];
  const std::uint64_t bit = std::uint64_t{1} << (chunk % 64);
  if ((word.load(std::memory_order_relaxed) & bit) != 0) return false;
  if ((word.fetch_or(bit, std::memory_order_relaxed) & bit) != 0) return false;
  touched_chunks_.fetch_add(1, std::memory_order_relaxed);
  if (blob_.is_present(chunk)) {
    const Origin origin = origins_[chunk].load(std::memory_order_relaxed);
    if (origin == Origin::local) touched_local_.fetch_add(1, std::memory_order_relaxed);
    if (origin == Origin::prefetch) touched_prefetched_.fetch_add(1, std::memory_order_relaxed);
    return true;
  }
  const std::lock_guard lock(mutex_);
  const auto at = active_.find(frames_.of(chunk));
  if (at != active_.end() && at->second.origin == Origin::prefetch) {
    touched_late_.fetch_add(1, std::memory_order_relaxed);
  }
  return true;
}

void Fetcher::set_plan(std::span<const PlanEntry> plan) {
  std::vector<std::uint32_t> order;
  order.reserve(plan.size());
  for (const PlanEntry& entry : plan) {
    if (entry.chunk >= map_.count() || frames_.of(entry.chunk) == FrameIndex::kNone) continue;
    if (blob_.is_present(entry.chunk)) {
      // On disk, perhaps not in memory: the kernel may fetch it while something else runs.
      const Chunk& chunk = map_.chunk(entry.chunk);
      ::posix_fadvise(blob_.data_fd(), static_cast<off_t>(chunk.raw_offset), chunk.raw_bytes,
                      POSIX_FADV_WILLNEED);
    }
    order.push_back(frames_.of(entry.chunk));
  }
  const std::lock_guard lock(mutex_);
  std::fill(planned_chunks_.begin(), planned_chunks_.end(), false);
  for (const PlanEntry& entry : plan) {
    if (entry.chunk < map_.count()) planned_chunks_[entry.chunk] = true;
  }
  planner_.set_plan(order);
  pump_locked();
  timer_wanted_.notify_one();
}

void Fetcher::start_background() noexcept {
  const std::lock_guard lock(mutex_);
  background_at_once_ = true;
  timer_wanted_.notify_one();
}

// ---- decoding ----

void Fetcher::decode_loop() {
  FrameDecoder decoder;
  std::unique_lock lock(mutex_);
  while (true) {
    decode_wanted_.wait(lock,
                        [this] { return closing_ || !decode_demand_.empty() || !decode_other_.empty(); });
    if (closing_) return;
    auto& queue = decode_demand_.empty() ? decode_other_ : decode_demand_;
    const DecodeJob job = std::move(queue.front());
    queue.pop_front();
    lock.unlock();
    if (!job.blob) {
      take_from_cache(job);
      lock.lock();
      continue;
    }
    // Members of a frame have equal content, so any of them will do.
    const Chunk& chunk = map_.chunk(frames_.members(job.frame)[0]);
    std::span<const std::byte> raw;
    switch (decoder.decode(chunk, std::span(job.blob.get(), chunk.blob_bytes), raw)) {
      case FrameDecoder::Result::ok:
        frame_is_right(job, raw);
        break;
      case FrameDecoder::Result::bad_frame:
        frame_is_wrong(job, "bad_frame");
        break;
      case FrameDecoder::Result::digest_mismatch:
        frame_is_wrong(job, "digest_mismatch");
        break;
    }
    lock.lock();
  }
}

void Fetcher::frame_is_right(const DecodeJob& job, std::span<const std::byte> raw) {
  std::vector<Waiter> waiters;
  std::vector<std::uint32_t> wanted;  // members to store
  Origin origin = Origin::demand;
  {
    const std::lock_guard lock(mutex_);
    const auto at = active_.find(job.frame);
    if (at == active_.end()) return;  // closing
    waiters.swap(at->second.waiters);
    origin = at->second.origin;
    const auto members = frames_.members(job.frame);
    for (const std::uint32_t chunk : members) {
      const bool is_awaited = std::any_of(waiters.begin(), waiters.end(),
                                          [chunk](const Waiter& waiter) { return waiter.chunk == chunk; });
      if (members.size() == 1 || is_awaited || planned_chunks_[chunk]) wanted.push_back(chunk);
    }
    if (wanted.empty()) wanted.push_back(members[0]);
  }
  // Readers first: they need not wait for the disk. Whoever asks from now on waits for the put below.
  deliver(waiters, raw);
  bool is_stored = true;
  for (const std::uint32_t chunk : wanted) {
    origins_[chunk].store(origin, std::memory_order_relaxed);
    is_stored = blob_.put(chunk, raw) && is_stored;
  }
  std::vector<Waiter> late;
  {
    const std::lock_guard lock(mutex_);
    const auto at = active_.find(job.frame);
    if (at == active_.end()) return;
    late.swap(at->second.waiters);
    retire_locked(at);
    decode_backlog_bytes_ -= frames_[job.frame].blob_bytes;
    counters_.decoded_bytes += raw.size();
    if (origin == Origin::prefetch) counters_.prefetched_chunks += wanted.size();
    for (const std::uint32_t chunk : wanted) {
      if (!is_stored && !blob_.is_ready(chunk)) memory_.insert(chunk, raw);
    }
    pump_locked();
  }
  deliver(late, raw);
}

void Fetcher::take_from_cache(const DecodeJob& job) {
  for (const std::uint32_t chunk : frames_.members(job.frame)) {
    if (!blob_.is_ready(chunk) && !blob_.prove(chunk)) continue;
    const Chunk& entry = map_.chunk(chunk);
    std::vector<std::byte> raw(entry.raw_bytes);
    if (blob_.read(entry.raw_offset, raw)) {
      frame_is_right(job, raw);
      return;
    }
    blob_.drop(chunk);
  }
  // It was not what its record said: our turn.
  const std::lock_guard lock(mutex_);
  const auto at = active_.find(job.frame);
  if (at == active_.end()) return;
  decode_backlog_bytes_ -= frames_[job.frame].blob_bytes;
  at->second.stage = Active::Stage::queued;
  demand_queue_.push_back(job.frame);
  pump_locked();
}

void Fetcher::frame_is_wrong(const DecodeJob& job, const char* name) {
  const std::uint32_t chunk = frames_.members(job.frame)[0];
  const Reason reason{name, Errc::integrity,
                      "chunk " + std::to_string(chunk) + " of " + source_.describe() + " is wrong (" + name +
                          "), expected sha256 " + to_hex(map_.chunk(chunk).sha256)};
  std::vector<Pending> reads;
  {
    const std::lock_guard lock(mutex_);
    const auto at = active_.find(job.frame);
    if (at == active_.end()) return;
    Active& active = at->second;
    decode_backlog_bytes_ -= frames_[job.frame].blob_bytes;
    counters_.wasted_bytes += frames_[job.frame].blob_bytes;
    note_error_locked(reason);
    if (++active.attempts < kMaxIntegrityAttempts) {
      ++counters_.integrity_retries;
      active.stage = Active::Stage::queued;
      demand_queue_.push_back(job.frame);
    } else {
      reads = take_reads_locked(active.waiters);
      planner_.give_up(job.frame);
      retire_locked(at);
    }
    pump_locked();
  }
  fail(reads, reason);
}

// ---- time ----

void Fetcher::timer_loop() {
  std::unique_lock lock(mutex_);
  while (!closing_) {
    expire(lock);
    if (closing_) return;
    poll_elsewhere_locked();
    pump_locked();
    const bool has_later_work =
        !planner_.is_done() || (options_.background_fill && !planner_.is_background_done());
    if (options_.background_fill && planner_.is_background_done() && !twins_are_copied_) {
      twins_are_copied_ = true;
      lock.unlock();
      copy_twins();
      lock.lock();
      continue;
    }
    auto until = Clock::now() + std::chrono::hours(1);
    if (has_later_work) until = Clock::now() + kTick;
    if (!elsewhere_.empty()) until = Clock::now() + kElsewhereTick;
    if (!parked_.empty()) until = std::min(until, parked_.front()->arrived + options_.deadline);
    timer_wanted_.wait_until(lock, until);
  }
}

void Fetcher::expire(std::unique_lock<std::mutex>& lock) {
  const auto now = Clock::now();
  std::vector<Pending> late;
  while (!parked_.empty() && parked_.front()->arrived + options_.deadline <= now) {
    const Pending read = parked_.front();
    read->is_finished = true;
    unpark_locked(*read);
    late.push_back(read);
  }
  if (late.empty()) return;
  const std::string failure = source_.last_failure();
  const std::string last = failure.empty() ? "" : " (" + failure + ")";
  const Reason reason{"deadline", Errc::timeout, "no answer from " + source_.describe() + " in time" + last};
  for (std::size_t i = 0; i < late.size(); ++i) note_error_locked(reason);
  lock.unlock();
  fail(late, reason);
  lock.lock();
}

void Fetcher::copy_twins() {
  for (std::uint32_t frame = 0; frame < frames_.count(); ++frame) {
    if (frames_[frame].member_count < 2) continue;
    for (const std::uint32_t chunk : frames_.members(frame)) {
      if (!blob_.is_present(chunk)) copy_from_twin(chunk);
    }
  }
}

void Fetcher::note_error_locked(const Reason& reason) {
  ++errors_[reason.name];
  last_error_ = std::string(reason.name) + ": " + reason.message;
}

void Fetcher::close() noexcept {
  std::vector<Source::Ticket> tickets;
  std::vector<Pending> reads;
  {
    const std::lock_guard lock(mutex_);
    if (closing_) return;
    closing_ = true;
    for (const auto& [frame, active] : active_) {
      if (active.stage == Active::Stage::in_flight) tickets.push_back(active.ticket);
    }
    for (const Pending& read : parked_) {
      read->is_finished = true;
      reads.push_back(read);
    }
    parked_.clear();
    active_.clear();
    decode_wanted_.notify_all();
    timer_wanted_.notify_all();
  }
  for (const Source::Ticket ticket : tickets) source_.cancel(ticket);
  fail(reads, {"closed", Errc::backend, "the file was closed"});
  {
    std::unique_lock lock(mutex_);
    quiet_.wait(lock, [this] { return requests_in_flight_ == 0; });
  }
  for (auto& thread : threads_) thread.join();
}

void Fetcher::add_statistics(Statistics& out) const {
  const std::uint64_t touched = touched_chunks_.load();
  const std::uint64_t local = touched_local_.load();
  const std::uint64_t useful = touched_prefetched_.load() + touched_late_.load();
  const std::lock_guard lock(mutex_);
  const Counters& c = counters_;
  std::uint64_t errors = 0;
  for (const auto& [name, count] : errors_) {
    out.add("error_" + name, count);
    errors += count;
  }
  out.add("errors", errors);
  out.add("last_error", last_error_);
  out.add("requests", c.demand_requests + c.prefetch_requests + c.background_requests);
  out.add("demand_requests", c.demand_requests);
  out.add("prefetch_requests", c.prefetch_requests);
  out.add("background_requests", c.background_requests);
  out.add("fetched_bytes", c.demand_bytes + c.prefetch_bytes + c.read_ahead_bytes + c.background_bytes);
  out.add("demand_bytes", c.demand_bytes);
  out.add("prefetch_bytes", c.prefetch_bytes);
  out.add("read_ahead_bytes", c.read_ahead_bytes);
  out.add("background_bytes", c.background_bytes);
  out.add("wasted_bytes", c.wasted_bytes);
  out.add("decoded_bytes", c.decoded_bytes);
  out.add("integrity_retries", c.integrity_retries);
  out.add("touched_chunks", touched);
  out.add("prefetched_chunks", c.prefetched_chunks);
  out.add("coverage", ratio(useful, touched - local));
  out.add("precision", std::min(1.0, ratio(useful, c.prefetched_chunks)));
  out.add("lateness_count", lateness_ns_.count());
  out.add("lateness_queued_count", c.late_queued);
  out.add("lateness_total_ns", lateness_ns_.total());
  out.add("lateness_p50_ns", lateness_ns_.quantile(0.5));
  out.add("lateness_p99_ns", lateness_ns_.quantile(0.99));
  out.add("stall_count", c.stalls);
  out.add("stall_total_ns", c.stall_ns);
  out.add("stall_max_ns", c.stall_max_ns);
  out.add("stall_p50_ns", stalls_ns_.quantile(0.5));
  out.add("stall_p99_ns", stalls_ns_.quantile(0.99));
  out.add("parked_reads", static_cast<std::uint64_t>(parked_.size()));
  out.add("plan_frames", static_cast<std::uint64_t>(planner_.planned_count()));
  out.add("plan_cursor", static_cast<std::uint64_t>(planner_.cursor()));
  out.add("plan_done", static_cast<std::uint64_t>(planner_.is_done() && prefetch_requests_in_flight_ == 0));
  out.add("bandwidth_bytes_per_s", pacer_.bytes_per_s());
  out.add("first_byte_ns", static_cast<std::uint64_t>(pacer_.first_byte_ns()));
  out.add("window_bytes", pacer_.window_bytes());
  out.add("memory_bytes", static_cast<std::uint64_t>(memory_.bytes()));
  out.add("fetched_elsewhere_bytes", c.elsewhere_bytes);
  out.add("fallback_served_from_memory", c.served_from_memory);
  out.add("fallback_local_read_failed", c.local_read_failures);
}

}  // namespace bootseer
