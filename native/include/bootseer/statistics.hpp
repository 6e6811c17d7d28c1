#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace bootseer {

// A flat list of named figures. Names are stable; units are in the names.
class Statistics {
 public:
  using Value = std::variant<std::uint64_t, double, std::string>;
  void add(std::string name, Value value) { entries_.emplace_back(std::move(name), std::move(value)); }
  const std::vector<std::pair<std::string, Value>>& entries() const noexcept { return entries_; }

 private:
  std::vector<std::pair<std::string, Value>> entries_;
};

// Count, sum and quantiles of a stream of durations; the quantiles are those of the last kKept.
class Samples {
 public:
  static constexpr std::size_t kKept = 4096;

  void add(std::uint64_t value) {
    if (kept_.size() < kKept) {
      kept_.push_back(value);
    } else {
      kept_[static_cast<std::size_t>(count_ % kKept)] = value;
    }
    ++count_;
    total_ += value;
  }
  std::uint64_t count() const noexcept { return count_; }
  std::uint64_t total() const noexcept { return total_; }
  std::uint64_t quantile(double q) const {
    if (kept_.empty()) return 0;
    auto sorted = kept_;
    const auto at = static_cast<std::size_t>(q * static_cast<double>(sorted.size() - 1));
    std::nth_element(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(at), sorted.end());
    return sorted[at];
  }

 private:
  std::vector<std::uint64_t> kept_;
  std::uint64_t count_ = 0;
  std::uint64_t total_ = 0;
};

}  // namespace bootseer
