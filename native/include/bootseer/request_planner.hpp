// Decides which bytes one request asks for. Pure: no threads, no clock.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "bootseer/frame_index.hpp"

namespace bootseer {

// Bytes between two wanted frames that are cheaper to receive and drop than to save by another request.
inline constexpr std::uint64_t kMaxGapBytes = 32ULL * 1024;

// A range of the blob and the frames in it that are wanted, in blob order.
struct RangePlan {
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  std::vector<std::uint32_t> frames;
};

// Cuts `frames` (any order, no repeats) into ranges: neighbours go together while the range stays below
// `max_bytes` (a single frame may exceed it).
std::vector<RangePlan> coalesce(const FrameIndex& index, std::vector<std::uint32_t> frames,
                                std::uint64_t max_bytes);

// Earliest first use first; neighbours in the blob that are due soon after come along.
class RequestPlanner {
 public:
  using IsWanted = std::function<bool(std::uint32_t frame)>;  // not here and not on its way

  explicit RequestPlanner(const FrameIndex& index);

  // Frames in order of first use; later repeats are ignored. Replaces the plan.
  void set_plan(std::span<const std::uint32_t> frames);

  // The next range of at most about `max_bytes`. Frames whose turn comes within the next `lookahead_bytes` of
  // the plan may come along. Empty (no frames) when nothing is left.
  RangePlan next(const IsWanted& is_wanted, std::uint64_t max_bytes, std::uint64_t lookahead_bytes);

  // The next range of the rest of the blob, in blob order.
  RangePlan next_background(const IsWanted& is_wanted, std::uint64_t max_bytes);

  // A planned frame did not come: it is due again.
  void revisit(std::uint32_t frame);
  // It is not worth another try.
  void give_up(std::uint32_t frame);

  bool is_planned(std::uint32_t frame) const noexcept { return position_[frame] != kNotPlanned; }
  std::size_t planned_count() const noexcept { return order_.size(); }
  std::size_t cursor() const noexcept { return cursor_; }
  bool is_done() const noexcept { return cursor_ == order_.size(); }
  bool is_background_done() const noexcept { return background_cursor_ == index_.count(); }

 private:
  static constexpr std::uint32_t kNotPlanned = 0xffffffff;
  bool may_come_along(std::uint32_t frame, const IsWanted& is_wanted, std::uint64_t lookahead_bytes) const;

  const FrameIndex& index_;
  std::vector<std::uint32_t> order_;     // frames by first use
  std::vector<std::uint64_t> due_at_;    // for each place in order_: planned bytes before it
  std::vector<std::uint32_t> position_;  // by frame: place in order_
  std::size_t cursor_ = 0;
  std::uint32_t background_cursor_ = 0;
};

}  // namespace bootseer
