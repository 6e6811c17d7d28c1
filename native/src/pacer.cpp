#include "bootseer/pacer.hpp"

#include <algorithm>

namespace bootseer {
namespace {

constexpr double kNewSampleWeight = 0.3;
constexpr std::size_t kRememberedFirstBytes = 64;
constexpr std::uint64_t kRequestsPerWindow = 6;
constexpr std::uint64_t kMinRequestBytes = 64ULL * 1024;
constexpr std::uint64_t kMaxRequestBytes = 2ULL * 1024 * 1024;

}  // namespace

void Pacer::first_byte(std::int64_t waited_ns) noexcept {
  // The minimum of the recent ones: waiting in queues is not the path's delay, and paths change.
  recent_first_bytes_.push_back(std::max<std::int64_t>(waited_ns, 1));
  if (recent_first_bytes_.size() > kRememberedFirstBytes) recent_first_bytes_.pop_front();
  shortest_ns_ = *std::min_element(recent_first_bytes_.begin(), recent_first_bytes_.end());
}

void Pacer::received(std::uint64_t bytes, std::int64_t now_ns, bool is_saturated) noexcept {
  if (sample_from_ns_ == 0) {
    sample_from_ns_ = now_ns;
    sample_bytes_ = 0;
    sample_is_saturated_ = true;
    return;
  }
  sample_bytes_ += bytes;
  sample_is_saturated_ = sample_is_saturated_ && is_saturated;
  const std::int64_t elapsed_ns = now_ns - sample_from_ns_;
  if (elapsed_ns < kSampleNs) return;
  const double rate = static_cast<double>(sample_bytes_) * 1e9 / static_cast<double>(elapsed_ns);
  if (bytes_per_s_ == 0) {
    bytes_per_s_ = rate;
  } else if (sample_is_saturated_ || rate > bytes_per_s_) {
    bytes_per_s_ += kNewSampleWeight * (rate - bytes_per_s_);
  }
  sample_from_ns_ = now_ns;
  sample_bytes_ = 0;
  sample_is_saturated_ = true;
}

std::uint64_t Pacer::window_bytes() const noexcept {
  if (bytes_per_s_ == 0 || shortest_ns_ == 0) return kFirstWindowBytes;
  const auto time_ns = static_cast<double>(std::max(2 * shortest_ns_, kMinQueueNs));
  const double bytes = bytes_per_s_ * time_ns / 1e9;
  return static_cast<std::uint64_t>(
      std::clamp(bytes, static_cast<double>(kMinWindowBytes), static_cast<double>(kMaxWindowBytes)));
}

std::uint64_t Pacer::request_bytes() const noexcept {
  return std::clamp(window_bytes() / kRequestsPerWindow, kMinRequestBytes, kMaxRequestBytes);
}

}  // namespace bootseer
