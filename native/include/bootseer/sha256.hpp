#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace bootseer {

using Digest = std::array<std::uint8_t, 32>;

Digest sha256(std::span<const std::byte> bytes);

// Digest of a stream that arrives in pieces.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  Sha256& operator=(Sha256&&) noexcept;
  void update(std::span<const std::byte> bytes);
  Digest finish();  // once; the object is spent afterwards

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::string to_hex(const Digest& digest);
// True when `text` is 64 lower-case hexadecimal digits.
bool is_hex_digest(std::string_view text) noexcept;

}  // namespace bootseer
