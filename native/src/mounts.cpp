#include "bootseer/mounts.hpp"

#include <fcntl.h>
#include <linux/loop.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <string_view>

#include "bootseer/bytes.hpp"
#include "bootseer/error.hpp"
#include "bootseer/fd.hpp"

namespace bootseer {
namespace {

constexpr unsigned long kImageFlags = MS_RDONLY | MS_NODEV;
constexpr off_t kErofsSuperOffset = 1024;
constexpr std::uint32_t kErofsMagic = 0xE0F5E1E2;
constexpr int kLoopAttempts = 16;
// A loop device reads ahead far more than a start uses; with EROFS's own this much is best.
constexpr int kLoopReadAheadKib = 128;
constexpr std::size_t kMountOptionBytes = 4095;  // mount(2) takes one page and cuts the rest off

bool try_mount(const std::string& source, const std::string& target, const char* options) {
  return ::mount(source.c_str(), target.c_str(), "erofs", kImageFlags, options) == 0;
}

// The kernel says EINVAL to a file that is no image, as it does to much else.
void check_magic(const std::string& image_path) {
  const UniqueFd image(::open(image_path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!image) throw_errno(image_path);
  std::array<std::byte, 4> magic{};
  const ssize_t n = ::pread(image.get(), magic.data(), magic.size(), kErofsSuperOffset);
  if (n < 0) throw_errno(image_path);
  if (static_cast<std::size_t>(n) < magic.size() || load_le<std::uint32_t>(magic.data()) != kErofsMagic) {
    throw Error(Errc::integrity, image_path + " is no EROFS image");
  }
}

std::string mount_by_loop(const std::string& image_path, const std::string& target) {
  const UniqueFd image(::open(image_path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!image) throw_errno(image_path);
  const UniqueFd control(::open("/dev/loop-control", O_RDWR | O_CLOEXEC));
  if (!control) throw_errno("/dev/loop-control");
  const std::string failure = "mount " + image_path + " on " + target + " by ";
  for (int attempt = 0; attempt < kLoopAttempts; ++attempt) {
    const int number = ::ioctl(control.get(), LOOP_CTL_GET_FREE);
    if (number < 0) throw_errno("no free loop device");
    const std::string device = "/dev/loop" + std::to_string(number);
    const UniqueFd loop(::open(device.c_str(), O_RDWR | O_CLOEXEC));
    if (!loop) throw_errno(device);
    loop_config config{};
    config.fd = static_cast<__u32>(image.get());
    config.block_size = 4096;
    config.info.lo_flags = LO_FLAGS_READ_ONLY | LO_FLAGS_AUTOCLEAR;
    if (::ioctl(loop.get(), LOOP_CONFIGURE, &config) != 0) {
      if (errno == EBUSY) continue;  // somebody else took it
      throw_errno(device);
    }
    std::ofstream("/sys/block/loop" + std::to_string(number) + "/queue/read_ahead_kb") << kLoopReadAheadKib;
    if (!try_mount(device, target, "")) throw_errno(failure + device);
    return "loop:" + device;
  }
  throw Error(Errc::internal, "no loop device could be had");
}

// overlayfs splits its options at commas and lower directories at colons.
std::string escape(const std::string& path, std::string_view separators) {
  std::string escaped;
  for (const char c : path) {
    if (c == '\\' || separators.find(c) != std::string_view::npos) escaped += '\\';
    escaped += c;
  }
  return escaped;
}

void set_read_only(const std::string& target, bool recursive) {
  mount_attr attributes{};
  attributes.attr_set = MOUNT_ATTR_RDONLY;
  const unsigned flags = AT_SYMLINK_NOFOLLOW | (recursive ? AT_RECURSIVE : 0U);
  if (::mount_setattr(AT_FDCWD, target.c_str(), flags, &attributes, sizeof attributes) == 0) return;
  // Before Linux 5.12 only the topmost mount can be had.
  if (errno != ENOSYS ||
      ::mount(nullptr, target.c_str(), nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY, nullptr) != 0) {
    throw_errno("read-only bind on " + target);
  }
}

}  // namespace

std::string mount_erofs(const std::string& image_path, const std::string& target, ErofsMount by) {
  check_magic(image_path);
  if (by == ErofsMount::loop) return mount_by_loop(image_path, target);
  if (try_mount(image_path, target, "directio")) return "file+directio";
  if (try_mount(image_path, target, "")) return "file";
  // ENOTBLK: a kernel before 6.12 wants a block device. ENOENT, ENOTDIR, EPERM … a loop would not cure.
  if (by == ErofsMount::file || (errno != ENOTBLK && errno != EINVAL)) {
    throw_errno("mount " + image_path + " on " + target);
  }
  return mount_by_loop(image_path, target);
}

void mount_overlay(const std::vector<std::string>& lower, const std::string& upper, const std::string& work,
                   const std::string& target) {
  if (lower.empty()) throw Error(Errc::usage, "an overlay needs a lower directory");
  std::string options = "lowerdir=";
  for (std::size_t i = 0; i < lower.size(); ++i) options += (i == 0 ? "" : ":") + escape(lower[i], ":,");
  options += ",upperdir=" + escape(upper, ",") + ",workdir=" + escape(work, ",");
  if (options.size() > kMountOptionBytes) {
    throw Error(Errc::usage, "the paths of an overlay on " + target + " are too long together");
  }
  if (::mount("overlay", target.c_str(), "overlay", 0, options.c_str()) != 0)
    throw_errno("mount overlay on " + target);
}

void mount_bind(const std::string& source, const std::string& target, bool recursive, bool read_only) {
  const auto flags = static_cast<unsigned long>(recursive ? MS_BIND | MS_REC : MS_BIND);
  if (::mount(source.c_str(), target.c_str(), nullptr, flags, nullptr) != 0) {
    throw_errno("bind " + source + " on " + target);
  }
  if (!read_only) return;
  try {
    set_read_only(target, recursive);
  } catch (...) {
    ::umount2(target.c_str(), MNT_DETACH);
    throw;
  }
}

void unmount(const std::string& target, bool lazy) {
  if (::umount2(target.c_str(), UMOUNT_NOFOLLOW | (lazy ? MNT_DETACH : 0)) != 0)
    throw_errno("umount " + target);
}

}  // namespace bootseer
