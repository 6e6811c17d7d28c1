#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

namespace bootseer {

// The last few chunks that found no place on disk, so that reading such a chunk piece by piece does not fetch
// it each time. Least recently used goes first. Not thread safe.
class MemoryChunks {
 public:
  explicit MemoryChunks(std::size_t max_bytes) : max_bytes_(max_bytes) {}

  void insert(std::uint32_t chunk, std::span<const std::byte> raw) {
    erase(chunk);
    while (!entries_.empty() && bytes_ + raw.size() > max_bytes_) erase(entries_.back().chunk);
    entries_.push_front({chunk, std::make_shared<std::vector<std::byte>>(raw.begin(), raw.end())});
    places_[chunk] = entries_.begin();
    bytes_ += raw.size();
  }

  // Null when it is not here.
  std::shared_ptr<const std::vector<std::byte>> find(std::uint32_t chunk) {
    const auto at = places_.find(chunk);
    if (at == places_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, at->second);
    return at->second->raw;
  }

  void erase(std::uint32_t chunk) {
    const auto at = places_.find(chunk);
    if (at == places_.end()) return;
    bytes_ -= at->second->raw->size();
    entries_.erase(at->second);
    places_.erase(at);
  }

  std::size_t bytes() const noexcept { return bytes_; }

 private:
  struct Entry {
    std::uint32_t chunk;
    std::shared_ptr<const std::vector<std::byte>> raw;
  };
  const std::size_t max_bytes_;
  std::size_t bytes_ = 0;
  std::list<Entry> entries_;  // most recently used first
  std::unordered_map<std::uint32_t, std::list<Entry>::iterator> places_;
};

}  // namespace bootseer
