// The part of the FUSE kernel protocol that the session reads or writes. Our own copy, because the headers of
// the oldest system we build on (Debian 12) lack passthrough and resend. Source: Linux
// include/uapi/linux/fuse.h, protocol 7.45. Host byte order.
#pragma once

#include <sys/ioctl.h>

#include <cstddef>
#include <cstdint>

namespace bootseer::fuse {

enum Opcode : std::uint32_t {
  kForget = 2,
  kOpen = 14,
  kRead = 15,
  kWrite = 16,
  kRelease = 18,
  kInit = 26,
  kCreate = 35,
  kInterrupt = 36,
  kDestroy = 38,
  kNotifyReply = 41,
  kBatchForget = 42,
  kTmpfile = 51,
};

struct InHeader {
  std::uint32_t len;
  std::uint32_t opcode;
  std::uint64_t unique;
  std::uint64_t nodeid;
  std::uint32_t uid;
  std::uint32_t gid;
  std::uint32_t pid;
  std::uint16_t total_extlen;
  std::uint16_t padding;
};
static_assert(sizeof(InHeader) == 40);

struct OutHeader {
  std::uint32_t len;
  std::int32_t error;
  std::uint64_t unique;
};
static_assert(sizeof(OutHeader) == 16);

struct InitIn {
  std::uint32_t major;
  std::uint32_t minor;
  std::uint32_t max_readahead;
  std::uint32_t flags;
  std::uint32_t flags2;  // from 7.36, when flags has kInitExt
  std::uint32_t unused[11];
};
static_assert(sizeof(InitIn) == 64);

struct InitOut {
  std::uint32_t major;
  std::uint32_t minor;
  std::uint32_t max_readahead;
  std::uint32_t flags;
  std::uint16_t max_background;
  std::uint16_t congestion_threshold;
  std::uint32_t max_write;
  std::uint32_t time_gran;
  std::uint16_t max_pages;
  std::uint16_t map_alignment;
  std::uint32_t flags2;
  std::uint32_t max_stack_depth;
  std::uint16_t request_timeout;
  std::uint16_t unused[11];
};
static_assert(sizeof(InitOut) == 64);

struct OpenIn {
  std::uint32_t flags;
  std::uint32_t open_flags;
};
static_assert(sizeof(OpenIn) == 8);

struct OpenOut {
  std::uint64_t fh;
  std::uint32_t open_flags;
  std::int32_t backing_id;
};
static_assert(sizeof(OpenOut) == 16);

constexpr std::size_t kEntryOutBytes = 128;  // fuse_entry_out; begins with the u64 nodeid

struct ReadIn {
  std::uint64_t fh;
  std::uint64_t offset;
  std::uint32_t size;
  std::uint32_t read_flags;
  std::uint64_t lock_owner;
  std::uint32_t flags;
  std::uint32_t padding;
};
static_assert(sizeof(ReadIn) == 40);

struct InterruptIn {
  std::uint64_t unique;
};

// INIT flags; bits from 32 up travel in flags2.
constexpr std::uint64_t kAsyncRead = 1ULL << 0;
constexpr std::uint64_t kAsyncDio = 1ULL << 15;
constexpr std::uint64_t kWritebackCache = 1ULL << 16;
constexpr std::uint64_t kParallelDirops = 1ULL << 18;
constexpr std::uint64_t kMaxPages = 1ULL << 22;
constexpr std::uint64_t kInitExt = 1ULL << 30;
constexpr std::uint64_t kPassthrough = 1ULL << 37;
constexpr std::uint64_t kHasResend = 1ULL << 39;

// FOPEN_* flags of OpenOut.
constexpr std::uint32_t kFopenDirectIo = 1U << 0;
constexpr std::uint32_t kFopenNoflush = 1U << 5;
constexpr std::uint32_t kFopenPassthrough = 1U << 7;

constexpr std::uint64_t kUniqueResend = 1ULL << 63;  // set in `unique` of a request that is sent again
constexpr std::int32_t kNotifyResend = 7;            // OutHeader.error of a message with unique 0

constexpr std::uint32_t kMinReadBufferBytes = 8192;

struct BackingMap {
  std::int32_t fd;
  std::uint32_t flags;
  std::uint64_t padding;
};
static_assert(sizeof(BackingMap) == 16);

inline constexpr unsigned long kIocBackingOpen = _IOW(229, 1, BackingMap);
inline constexpr unsigned long kIocBackingClose = _IOW(229, 2, std::uint32_t);

}  // namespace bootseer::fuse
