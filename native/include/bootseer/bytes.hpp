// Little-endian fields in byte buffers, whatever the host's order and the field's alignment.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstring>

namespace bootseer {

template <std::unsigned_integral T>
T load_le(const std::byte* from) noexcept {
  T value;
  std::memcpy(&value, from, sizeof value);
  if constexpr (std::endian::native == std::endian::big) {
    T swapped = 0;
    for (std::size_t i = 0; i < sizeof value; ++i)
      swapped = static_cast<T>(swapped << 8 | (value >> (8 * i) & 0xff));
    value = swapped;
  }
  return value;
}

template <std::unsigned_integral T>
void store_le(std::byte* to, T value) noexcept {
  for (std::size_t i = 0; i < sizeof value; ++i) to[i] = static_cast<std::byte>(value >> (8 * i) & 0xff);
}

}  // namespace bootseer
