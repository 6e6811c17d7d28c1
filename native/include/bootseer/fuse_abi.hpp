// The parts of the kernel's FUSE interface that are younger than the headers we may be built with.
// Source: include/uapi/linux/fuse.h of Linux 6.12.
#pragma once

#include <linux/fuse.h>
#include <linux/ioctl.h>

#include <cstdint>

namespace bootseer::fuse_abi {

constexpr std::uint64_t kInitExt = 1ULL << 30;          // FUSE_INIT_EXT: flags2 counts
constexpr std::uint64_t kPassthrough = 1ULL << 37;      // FUSE_PASSTHROUGH, Linux 6.9
constexpr std::uint64_t kHasResend = 1ULL << 39;        // FUSE_HAS_RESEND, Linux 6.9
constexpr std::uint32_t kOpenPassthrough = 1U << 7;     // FOPEN_PASSTHROUGH
constexpr std::int32_t kNotifyResend = 7;               // FUSE_NOTIFY_RESEND
constexpr std::uint32_t kPassthroughMinor = 40;         // protocol 7.40 brought both

// fuse_init_out of 7.40: the first of the unused words became max_stack_depth.
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
  std::uint32_t unused[6];
};
static_assert(sizeof(InitOut) == sizeof(fuse_init_out));

// fuse_open_out of 7.40: the padding became backing_id.
struct OpenOut {
  std::uint64_t fh;
  std::uint32_t open_flags;
  std::int32_t backing_id;
};
static_assert(sizeof(OpenOut) == sizeof(fuse_open_out));

struct BackingMap {
  std::int32_t fd;
  std::uint32_t flags;
  std::uint64_t padding;
};

constexpr unsigned long kBackingOpen = _IOW(229, 1, BackingMap);      // FUSE_DEV_IOC_BACKING_OPEN
constexpr unsigned long kBackingClose = _IOW(229, 2, std::uint32_t);  // FUSE_DEV_IOC_BACKING_CLOSE

}  // namespace bootseer::fuse_abi
