// What is asked of the source, and when. Reads and decoding: fetcher.cpp.
#include <algorithm>
#include <cstring>

#include "bootseer/fetcher.hpp"

namespace bootseer {
namespace {

constexpr std::uint64_t kMaxDemandRequestBytes = 2ULL * 1024 * 1024;
constexpr std::uint64_t kBackgroundRequestBytes = 1024ULL * 1024;
constexpr unsigned kMaxBackgroundRequests = 2;
constexpr unsigned kMaxPrefetchRequests = 8;
constexpr std::uint64_t kMaxDecodeBacklogBytes = 16ULL * 1024 * 1024;
constexpr std::uint32_t kMaxReadAheadChunks = 4;
constexpr auto kQuietBeforeBackground = std::chrono::milliseconds(200);  // once the workload is ready
constexpr auto kPatienceWithOthers = std::chrono::seconds(1);
constexpr auto kFirstPause = std::chrono::milliseconds(500);
constexpr auto kLongestPause = std::chrono::seconds(30);

}  // namespace

// One range on its way. Cuts the stream into frames and hands each over as soon as it is whole.
class Fetcher::Request final : public FetchSink {
 public:
  Request(Fetcher& owner, RangePlan range, Priority priority)
      : owner_(owner), range_(std::move(range)), priority_(priority), issued_(Clock::now()) {}

  bool data(std::span<const std::byte> bytes) noexcept override {
    try {
      if (!saw_first_byte_) owner_.first_byte_came(issued_);
      saw_first_byte_ = true;
      while (!bytes.empty() && next_ < range_.frames.size()) bytes = bytes.subspan(take(bytes));
      return true;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }

  void done(const FetchOutcome& outcome) noexcept override { owner_.request_ended(*this, outcome); }

  Priority priority() const noexcept { return priority_; }
  std::span<const std::uint32_t> missing_frames() const noexcept {
    return std::span(range_.frames).subspan(next_);
  }
  std::uint64_t unaccounted() const noexcept { return range_.length - accounted_; }
  // Bytes of the range received since the last call.
  std::uint64_t account() noexcept { return position_ - std::exchange(accounted_, position_); }

 private:
  std::size_t take(std::span<const std::byte> bytes) {
    const std::uint32_t frame = range_.frames[next_];
    const Frame& entry = owner_.frames_[frame];
    const std::uint64_t frame_from = entry.blob_offset - range_.offset;
    if (position_ < frame_from) {  // a gap that was cheaper to receive than to avoid
      const auto gap =
          static_cast<std::size_t>(std::min<std::uint64_t>(frame_from - position_, bytes.size()));
      position_ += gap;
      return gap;
    }
    const auto filled = static_cast<std::size_t>(position_ - frame_from);
    if (!blob_) blob_ = std::make_unique_for_overwrite<std::byte[]>(entry.blob_bytes);
    const std::size_t part = std::min<std::size_t>(entry.blob_bytes - filled, bytes.size());
    std::memcpy(blob_.get() + filled, bytes.data(), part);
    position_ += part;
    if (filled + part == entry.blob_bytes) {
      ++next_;
      owner_.frame_arrived(*this, frame, std::move(blob_));
    }
    return part;
  }

  Fetcher& owner_;
  const RangePlan range_;
  const Priority priority_;
  const Clock::time_point issued_;
  bool saw_first_byte_ = false;
  std::size_t next_ = 0;         // place in range_.frames
  std::uint64_t position_ = 0;   // bytes received
  std::uint64_t accounted_ = 0;  // of these, told to the fetcher
  std::unique_ptr<std::byte[]> blob_;
};

bool Fetcher::is_wanted_locked(std::uint32_t frame) const {
  // Where one of several equal chunks is here, the others can be copied from it.
  return !active_.contains(frame) && !has_member_locked(frame);
}

bool Fetcher::has_member_locked(std::uint32_t frame) const {
  const auto members = frames_.members(frame);
  return std::any_of(members.begin(), members.end(),
                     [this](std::uint32_t chunk) { return blob_.is_present(chunk); });
}

void Fetcher::pump_locked() {
  if (closing_) return;
  pump_demand_locked();
  pump_prefetch_locked();
  pump_background_locked();
}

void Fetcher::pump_demand_locked() {
  if (demand_queue_.empty()) return;
  std::vector<std::uint32_t> queue;
  queue.swap(demand_queue_);
  for (const RangePlan& range : coalesce(frames_, std::move(queue), kMaxDemandRequestBytes)) {
    issue_locked(range, Priority::demand, Origin::demand);
  }
}

void Fetcher::pump_prefetch_locked() {
  if (planner_.is_done() || blob_.is_refusing() || Clock::now() < prefetch_paused_until_) return;
  blob_.refresh();
  const auto is_wanted = [this](std::uint32_t frame) { return is_wanted_locked(frame); };
  // A demand read that was not foreseen shares the link with what is in flight: leave it more room.
  const std::uint64_t window = pacer_.window_bytes() / (demand_requests_in_flight_ > 0 ? 2 : 1);
  while (prefetch_in_flight_bytes_ < window && prefetch_requests_in_flight_ < kMaxPrefetchRequests &&
         decode_backlog_bytes_ < kMaxDecodeBacklogBytes) {
    const RangePlan range = planner_.next(is_wanted, pacer_.request_bytes(), pacer_.window_bytes());
    if (range.frames.empty()) return;
    issue_locked(range, Priority::prefetch, Origin::prefetch);
  }
}

void Fetcher::pump_background_locked() {
  if (!options_.background_fill || !planner_.is_done() || prefetch_requests_in_flight_ > 0) return;
  if (demand_requests_in_flight_ > 0 || !parked_.empty() || blob_.is_refusing()) return;
  const auto now = Clock::now();
  const std::chrono::nanoseconds quiet =
      background_at_once_ ? kQuietBeforeBackground : options_.idle_before_background;
  if (now < prefetch_paused_until_ || now - last_demand_ < quiet) return;
  const auto is_wanted = [this](std::uint32_t frame) { return is_wanted_locked(frame); };
  while (background_requests_in_flight_ < kMaxBackgroundRequests &&
         decode_backlog_bytes_ < kMaxDecodeBacklogBytes) {
    const RangePlan range = planner_.next_background(is_wanted, kBackgroundRequestBytes);
    if (range.frames.empty()) return;
    issue_locked(range, Priority::background, Origin::background);
  }
}

// Leaves to other processes what they fetch already, and takes from the cache what they have brought.
void Fetcher::issue_locked(const RangePlan& range, Priority priority, Origin origin) {
  std::vector<std::uint32_t> ours;
  for (const std::uint32_t frame : range.frames) {
    const auto [at, is_new] = active_.try_emplace(frame);
    Active& active = at->second;
    if (is_new) active.origin = origin;
    if (!active.is_claimed && !blob_.claim_fetch(frame)) {
      active.stage = Active::Stage::elsewhere;
      active.elsewhere_since = Clock::now();
      elsewhere_.push_back(frame);
      continue;
    }
    active.is_claimed = true;
    ours.push_back(frame);
  }
  if (!elsewhere_.empty()) timer_wanted_.notify_one();
  // Whoever gave a claim back has recorded before what it brought. (The answer of refresh() does not matter:
  // another of our threads may have learned the news.)
  blob_.refresh();
  std::erase_if(ours, [this](std::uint32_t frame) {
    if (!has_member_locked(frame)) return false;
    queue_decode_locked(frame, active_.at(frame), nullptr);
    return true;
  });
  if (ours.size() == range.frames.size()) {
    issue_claimed_locked(range, priority);
    return;
  }
  for (const RangePlan& part : coalesce(frames_, std::move(ours), range.length)) {
    issue_claimed_locked(part, priority);
  }
}

void Fetcher::poll_elsewhere_locked() {
  if (elsewhere_.empty() || closing_) return;
  std::vector<std::uint32_t> frames;
  frames.swap(elsewhere_);
  blob_.refresh();
  std::vector<std::uint32_t> demanded;
  std::vector<std::uint32_t> foreseen;
  for (const std::uint32_t frame : frames) {
    const auto at = active_.find(frame);
    if (at == active_.end() || at->second.stage != Active::Stage::elsewhere) continue;
    Active& active = at->second;
    if (has_member_locked(frame)) {
      queue_decode_locked(frame, active, nullptr);
      continue;
    }
    // The other has failed or died; or it takes so long that waiting readers should not depend on it.
    const bool is_free = blob_.claim_fetch(frame);
    const bool is_too_slow =
        !active.waiters.empty() && Clock::now() - active.elsewhere_since > kPatienceWithOthers;
    if (!is_free && !is_too_slow) {
      elsewhere_.push_back(frame);
      continue;
    }
    active.is_claimed = true;
    (active.waiters.empty() ? foreseen : demanded).push_back(frame);
  }
  for (const RangePlan& range : coalesce(frames_, std::move(demanded), kMaxDemandRequestBytes)) {
    issue_locked(range, Priority::demand, Origin::demand);
  }
  for (const RangePlan& range : coalesce(frames_, std::move(foreseen), pacer_.request_bytes())) {
    issue_locked(range, Priority::prefetch, Origin::prefetch);
  }
}

void Fetcher::retire_locked(ActiveFrames::iterator at) {
  if (at->second.is_claimed) blob_.release_fetch(at->first);
  active_.erase(at);
}

void Fetcher::queue_decode_locked(std::uint32_t frame, Active& active, std::unique_ptr<std::byte[]> blob) {
  if (!blob) {
    active.origin = Origin::local;
    counters_.elsewhere_bytes += frames_[frame].blob_bytes;
  }
  active.stage = Active::Stage::decoding;
  auto& queue = active.waiters.empty() ? decode_other_ : decode_demand_;
  queue.push_back({frame, std::move(blob)});
  decode_backlog_bytes_ += frames_[frame].blob_bytes;
  decode_wanted_.notify_one();
}

// The source never calls back from within fetch(), so holding the lock is safe, and the ticket is known
// before anybody can want it.
void Fetcher::issue_claimed_locked(const RangePlan& range, Priority priority) {
  const auto request = std::make_shared<Request>(*this, range, priority);
  const Source::Ticket ticket = source_.fetch(range.offset, range.length, priority, request);
  for (const std::uint32_t frame : range.frames) {
    Active& active = active_.at(frame);
    active.stage = Active::Stage::in_flight;
    active.ticket = ticket;
  }
  ++requests_in_flight_;
  switch (priority) {
    case Priority::demand:
      ++demand_requests_in_flight_;
      ++counters_.demand_requests;
      break;
    case Priority::prefetch:
      ++prefetch_requests_in_flight_;
      ++counters_.prefetch_requests;
      prefetch_in_flight_bytes_ += range.length;
      break;
    case Priority::background:
      ++background_requests_in_flight_;
      ++counters_.background_requests;
      break;
  }
}

void Fetcher::first_byte_came(Clock::time_point issued) {
  const std::lock_guard lock(mutex_);
  pacer_.first_byte(std::chrono::nanoseconds(Clock::now() - issued).count());
}

void Fetcher::frame_arrived(Request& request, std::uint32_t frame, std::unique_ptr<std::byte[]> blob) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t frame_bytes = frames_[frame].blob_bytes;
  const std::uint64_t bytes = request.account();
  counters_.wasted_bytes += bytes - std::min(bytes, frame_bytes);
  const bool is_saturated = prefetch_in_flight_bytes_ >= pacer_.window_bytes() / 2;
  pacer_.received(bytes, Clock::now().time_since_epoch().count(), is_saturated);
  if (request.priority() == Priority::prefetch) prefetch_in_flight_bytes_ -= bytes;
  const auto at = active_.find(frame);
  if (at == active_.end()) return;  // closing
  Active& active = at->second;
  switch (active.origin) {
    case Origin::prefetch:
      counters_.prefetch_bytes += frame_bytes;
      break;
    case Origin::read_ahead:
      counters_.read_ahead_bytes += frame_bytes;
      break;
    case Origin::background:
      counters_.background_bytes += frame_bytes;
      break;
    default:
      counters_.demand_bytes += frame_bytes;
  }
  queue_decode_locked(frame, active, std::move(blob));
  pump_locked();
}

void Fetcher::request_ended(Request& request, const FetchOutcome& outcome) {
  std::vector<Pending> reads;
  const Reason reason{fault_name(outcome.fault),
                      fault_errc(outcome.fault) == Errc::timeout ? Errc::timeout : Errc::backend,
                      outcome.message};
  {
    const std::lock_guard lock(mutex_);
    --requests_in_flight_;
    switch (request.priority()) {
      case Priority::demand:
        --demand_requests_in_flight_;
        break;
      case Priority::prefetch:
        --prefetch_requests_in_flight_;
        prefetch_in_flight_bytes_ -= request.unaccounted();
        break;
      case Priority::background:
        --background_requests_in_flight_;
        break;
    }
    if (requests_in_flight_ == 0) pacer_.idle();
    if (outcome.fault == Fault::none) {
      prefetch_failures_ = 0;
    } else if (!closing_) {
      note_error_locked(reason);
      for (const std::uint32_t frame : request.missing_frames()) {
        const auto at = active_.find(frame);
        if (at == active_.end()) continue;
        auto failed = take_reads_locked(at->second.waiters);
        reads.insert(reads.end(), failed.begin(), failed.end());
        retire_locked(at);
        planner_.revisit(frame);
      }
      const auto now = Clock::now();
      // Requests that fail together count as one failure.
      if (request.priority() != Priority::demand && now >= prefetch_paused_until_) {
        const auto pause = kFirstPause * (1 << std::min(prefetch_failures_++, 6U));
        prefetch_paused_until_ = now + std::min<std::chrono::nanoseconds>(kLongestPause, pause);
        timer_wanted_.notify_one();
      }
    }
    pump_locked();
    // The last thing under the lock: close() may destroy us once it sees no request left.
    quiet_.notify_all();
  }
  fail(reads, reason);
}

// Without a plan, reads that go through the image in order get the next chunks along with the missing one.
void Fetcher::read_ahead_locked(std::uint32_t first_chunk, std::uint32_t last_chunk) {
  if (!planner_.is_done()) return;
  Stream* stream = &streams_[0];
  bool goes_on = false;
  for (Stream& candidate : streams_) {
    // A chunk left out is still a walk through the file.
    goes_on = first_chunk == candidate.next_chunk || first_chunk == candidate.next_chunk + 1;
    if (goes_on) {
      stream = &candidate;
      break;
    }
    if (candidate.used < stream->used) stream = &candidate;
  }
  stream->run = goes_on ? std::min(std::max(1U, stream->run * 2), kMaxReadAheadChunks) : 0;
  stream->used = ++stream_clock_;
  std::uint32_t chunk = last_chunk + 1;
  for (std::uint32_t i = 0; i < stream->run && chunk < map_.count(); ++i, ++chunk) {
    const std::uint32_t frame = frames_.of(chunk);
    if (frame == FrameIndex::kNone || !is_wanted_locked(frame)) break;
    active_[frame].origin = Origin::read_ahead;
    demand_queue_.push_back(frame);
  }
  stream->next_chunk = chunk;
}

}  // namespace bootseer
