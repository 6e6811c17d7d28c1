#pragma once

#include <cstdint>
#include <deque>

namespace bootseer {

// How much to have in flight so that the link stays full, and no more, because a demand read waits behind it.
// Pure arithmetic: the caller brings the clock and the lock.
class Pacer {
 public:
  void first_byte(std::int64_t waited_ns) noexcept;
  // Bytes arrived. `is_saturated`: enough was in flight since the last call that the link set the pace.
  void received(std::uint64_t bytes, std::int64_t now_ns, bool is_saturated) noexcept;
  // Nothing is in flight any more: the time until the next byte is not the link's.
  void idle() noexcept { sample_from_ns_ = 0; }

  double bytes_per_s() const noexcept { return bytes_per_s_; }          // 0 when not known yet
  std::int64_t first_byte_ns() const noexcept { return shortest_ns_; }  // 0 when not known yet

  // Bytes in flight for prefetch: twice the bandwidth-delay product (the factor lets the estimate grow),
  // or what the link carries in kMinQueueNs if that is more.
  std::uint64_t window_bytes() const noexcept;
  // Bytes of one request.
  std::uint64_t request_bytes() const noexcept;

  static constexpr std::uint64_t kFirstWindowBytes = 1024ULL * 1024;
  static constexpr std::uint64_t kMinWindowBytes = 512ULL * 1024;
  static constexpr std::uint64_t kMaxWindowBytes = 16ULL * 1024 * 1024;
  static constexpr std::int64_t kMinQueueNs = 30'000'000;
  static constexpr std::int64_t kSampleNs = 20'000'000;

 private:
  double bytes_per_s_ = 0;
  std::int64_t sample_from_ns_ = 0;
  std::uint64_t sample_bytes_ = 0;
  bool sample_is_saturated_ = true;
  std::deque<std::int64_t> recent_first_bytes_;
  std::int64_t shortest_ns_ = 0;
};

}  // namespace bootseer
