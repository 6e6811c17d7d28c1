#pragma once

#include <cstddef>
#include <cstring>
#include <span>

namespace bootseer {

inline bool is_zeros(std::span<const std::byte> bytes) noexcept {
  // Compared with itself, one byte on: as fast as memory.
  return bytes.empty() || (bytes.front() == std::byte{0} &&
                           std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0);
}

}  // namespace bootseer
