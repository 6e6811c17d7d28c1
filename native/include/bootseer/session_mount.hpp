// mount(2) and the kernel's per-mount settings, apart from any protocol.
#pragma once

#include <bootseer/fd.hpp>
#include <cstdint>
#include <optional>
#include <string>

namespace bootseer {

struct MountRequest {
  std::string mountpoint;
  std::string fsname = "bootseer";
  std::string subtype = "bootseer";
  std::uint32_t max_read_bytes = 1U << 20;
  bool allow_other = true;
  bool read_only = true;
};

// Opens /dev/fuse and mounts it. Throws std::system_error, or Error(usage) for a name that cannot be a mount
// option.
UniqueFd mount_fuse(const MountRequest& request);

// Throws std::system_error.
void unmount_fuse(const std::string& mountpoint, bool lazy);

struct DeviceNumber {
  unsigned major = 0;
  unsigned minor = 0;
};

// The device number of the topmost mount on `mountpoint`, from the text of /proc/self/mountinfo (never by
// asking the file system, which could be the one we serve). Empty when nothing is mounted there.
std::optional<DeviceNumber> find_mount(const std::string& mountinfo, const std::string& mountpoint);
std::optional<DeviceNumber> find_mount(const std::string& mountpoint);

// One decimal number in a file of /sys; empty when it cannot be read.
std::optional<std::uint64_t> read_number(const std::string& path);
// Returns 0 or an errno.
int write_number(const std::string& path, std::uint64_t value);

}  // namespace bootseer
