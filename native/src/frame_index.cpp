#include "bootseer/frame_index.hpp"

#include <algorithm>

namespace bootseer {

FrameIndex::FrameIndex(const ChunkMap& map) : frame_of_(map.count(), kNone) {
  members_.reserve(map.count());
  for (std::uint32_t i = 0; i < map.count(); ++i) {
    if (!map.chunk(i).is_zeros()) members_.push_back(i);
  }
  // Disjoint or equal ranges (the map was checked), so the offset alone orders them.
  std::stable_sort(members_.begin(), members_.end(), [&map](std::uint32_t a, std::uint32_t b) {
    return map.chunk(a).blob_offset < map.chunk(b).blob_offset;
  });
  for (std::uint32_t at = 0; at < members_.size(); ++at) {
    const Chunk& chunk = map.chunk(members_[at]);
    if (frames_.empty() || frames_.back().blob_offset != chunk.blob_offset) {
      frames_.push_back({chunk.blob_offset, chunk.blob_bytes, at, 0});
    }
    ++frames_.back().member_count;
    frame_of_[members_[at]] = count() - 1;
  }
}

}  // namespace bootseer
