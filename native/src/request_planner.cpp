#include "bootseer/request_planner.hpp"

#include <algorithm>

namespace bootseer {

std::vector<RangePlan> coalesce(const FrameIndex& index, std::vector<std::uint32_t> frames,
                                std::uint64_t max_bytes) {
  std::sort(frames.begin(), frames.end());
  std::vector<RangePlan> ranges;
  for (const std::uint32_t frame : frames) {
    const Frame& entry = index[frame];
    if (!ranges.empty()) {
      RangePlan& last = ranges.back();
      const std::uint64_t end = last.offset + last.length;
      if (entry.blob_offset - end <= kMaxGapBytes && entry.blob_end() - last.offset <= max_bytes) {
        last.length = entry.blob_end() - last.offset;
        last.frames.push_back(frame);
        continue;
      }
    }
    ranges.push_back({entry.blob_offset, entry.blob_bytes, {frame}});
  }
  return ranges;
}

RequestPlanner::RequestPlanner(const FrameIndex& index)
    : index_(index), position_(index.count(), kNotPlanned) {}

void RequestPlanner::set_plan(std::span<const std::uint32_t> frames) {
  std::fill(position_.begin(), position_.end(), kNotPlanned);
  order_.clear();
  due_at_.clear();
  cursor_ = 0;
  std::uint64_t bytes = 0;
  for (const std::uint32_t frame : frames) {
    if (frame >= index_.count() || position_[frame] != kNotPlanned) continue;
    position_[frame] = static_cast<std::uint32_t>(order_.size());
    order_.push_back(frame);
    due_at_.push_back(bytes);
    bytes += index_[frame].blob_bytes;
  }
}

bool RequestPlanner::may_come_along(std::uint32_t frame, const IsWanted& is_wanted,
                                    std::uint64_t lookahead_bytes) const {
  const std::uint32_t place = position_[frame];
  return place != kNotPlanned && place >= cursor_ && due_at_[place] - due_at_[cursor_] <= lookahead_bytes &&
         is_wanted(frame);
}

RangePlan RequestPlanner::next(const IsWanted& is_wanted, std::uint64_t max_bytes,
                               std::uint64_t lookahead_bytes) {
  while (cursor_ < order_.size() && !(is_planned(order_[cursor_]) && is_wanted(order_[cursor_]))) ++cursor_;
  if (cursor_ == order_.size()) return {};
  const std::uint32_t first = order_[cursor_];
  RangePlan range{index_[first].blob_offset, index_[first].blob_bytes, {first}};
  // Forwards from the frame that is due, over gaps that are not worth a request of their own.
  for (std::uint32_t frame = first + 1; frame < index_.count(); ++frame) {
    const Frame& entry = index_[frame];
    if (entry.blob_offset - (range.offset + range.length) > kMaxGapBytes) break;
    if (entry.blob_end() - range.offset > max_bytes) break;
    if (!may_come_along(frame, is_wanted, lookahead_bytes)) continue;
    range.length = entry.blob_end() - range.offset;
    range.frames.push_back(frame);
  }
  // Backwards only over what touches: these bytes arrive before the frame that is due.
  for (std::uint32_t frame = first; frame > 0;) {
    const Frame& entry = index_[--frame];
    if (entry.blob_end() != range.offset || range.length + entry.blob_bytes > max_bytes) break;
    if (!may_come_along(frame, is_wanted, lookahead_bytes / 4)) break;
    range.offset = entry.blob_offset;
    range.length += entry.blob_bytes;
    range.frames.insert(range.frames.begin(), frame);
  }
  ++cursor_;
  return range;
}

RangePlan RequestPlanner::next_background(const IsWanted& is_wanted, std::uint64_t max_bytes) {
  while (background_cursor_ < index_.count() && !is_wanted(background_cursor_)) ++background_cursor_;
  RangePlan range;
  for (; background_cursor_ < index_.count(); ++background_cursor_) {
    const Frame& entry = index_[background_cursor_];
    if (!is_wanted(background_cursor_)) break;
    if (range.frames.empty()) {
      range.offset = entry.blob_offset;
    } else if (entry.blob_offset != range.offset + range.length ||
               range.length + entry.blob_bytes > max_bytes) {
      break;
    }
    range.length += entry.blob_bytes;
    range.frames.push_back(background_cursor_);
  }
  return range;
}

void RequestPlanner::revisit(std::uint32_t frame) {
  if (position_[frame] != kNotPlanned) cursor_ = std::min<std::size_t>(cursor_, position_[frame]);
  background_cursor_ = std::min(background_cursor_, frame);
}

void RequestPlanner::give_up(std::uint32_t frame) {
  position_[frame] = kNotPlanned;
}

}  // namespace bootseer
