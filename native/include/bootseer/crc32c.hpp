#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace bootseer {

// CRC-32C (Castagnoli) of `bytes`, continuing `seed` (the crc of what came before). Uses the processor's
// instruction where there is one.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed = 0) noexcept;

// The table-driven reference, the only path on machines without the instruction.
std::uint32_t crc32c_portable(std::span<const std::byte> bytes, std::uint32_t seed = 0) noexcept;

}  // namespace bootseer
