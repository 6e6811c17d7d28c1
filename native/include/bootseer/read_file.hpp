// The seam between the Session (which speaks FUSE) and whatever has bytes (which does not).
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace bootseer {

// Who asked, for the trace.
struct ReadContext {
  std::uint32_t pid = 0;  // as the kernel reports it; 0 when a kernel thread reads ahead
};

// One answer to one read. Exactly one of data() and error() is called, once, from any thread; the views given
// to data() need to live only until it returns.
class ReadReply {
 public:
  virtual ~ReadReply() = default;
  virtual void data(std::span<const iovec> parts) noexcept = 0;
  virtual void error(int errno_value) noexcept = 0;
};

// A read-only file whose bytes may live elsewhere.
class ReadFile {
 public:
  virtual ~ReadFile() = default;

  virtual std::uint64_t size() const noexcept = 0;

  // Answers from local bytes without waiting for anything but local disk. On success `out` views the bytes
  // (in `scratch`, which holds at least `length` bytes, or in memory that stays mapped as long as this file),
  // and the return value is their number: min(length, size - offset), 0 at or past the end. Returns -EAGAIN
  // when bytes are missing (call read()), another negative errno when they can never be had.
  virtual ssize_t try_read(std::uint64_t offset, std::size_t length, const ReadContext& context,
                           std::span<std::byte> scratch, iovec& out) noexcept = 0;

  // Answers when the bytes are there, or with an errno: EIO (integrity, or origin refused), ETIMEDOUT
  // (deadline). Never blocks the caller.
  virtual void read(std::uint64_t offset, std::size_t length, const ReadContext& context,
                    std::unique_ptr<ReadReply> reply) noexcept = 0;

  // A descriptor of a complete local file with the same bytes at the same offsets, or -1. Stays open as long
  // as this object. Used for FUSE passthrough.
  virtual int backing_fd() const noexcept { return -1; }
};

}  // namespace bootseer
