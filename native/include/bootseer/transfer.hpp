// Whole transfers over descriptors: no short count, no EINTR. Errors as return values, for callers that must
// not throw.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace bootseer {

// 0, or an errno. A device that takes nothing counts as full (ENOSPC).
int write_all(int fd, std::span<const std::byte> bytes) noexcept;
int pwrite_all(int fd, std::span<const std::byte> bytes, std::uint64_t offset) noexcept;

// How many bytes were read (fewer only at the end of the file), or -errno.
ssize_t pread_all(int fd, std::span<std::byte> out, std::uint64_t offset) noexcept;

}  // namespace bootseer
