#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "bootseer/chunk_map.hpp"

namespace bootseer {

// A range of the blob that is fetched as one: usually one chunk, more when equal chunks share their bytes.
struct Frame {
  std::uint64_t blob_offset = 0;
  std::uint32_t blob_bytes = 0;
  std::uint32_t first_member = 0;  // into FrameIndex::members
  std::uint32_t member_count = 0;

  std::uint64_t blob_end() const noexcept { return blob_offset + blob_bytes; }
};

// The distinct blob ranges of a map, in blob order. Chunks of zeros belong to none.
class FrameIndex {
 public:
  static constexpr std::uint32_t kNone = 0xffffffff;

  explicit FrameIndex(const ChunkMap& map);

  std::uint32_t count() const noexcept { return static_cast<std::uint32_t>(frames_.size()); }
  const Frame& operator[](std::uint32_t frame) const noexcept { return frames_[frame]; }
  std::uint32_t of(std::uint32_t chunk) const noexcept { return frame_of_[chunk]; }
  std::span<const std::uint32_t> members(std::uint32_t frame) const noexcept {
    return std::span(members_).subspan(frames_[frame].first_member, frames_[frame].member_count);
  }

 private:
  std::vector<Frame> frames_;
  std::vector<std::uint32_t> members_;   // chunks by blob offset
  std::vector<std::uint32_t> frame_of_;  // by chunk
};

}  // namespace bootseer
