#include "bootseer/mounts.hpp"

#include <fcntl.h>
#include <linux/loop.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <fstream>

#include "bootseer/error.hpp"
#include "bootseer/fd.hpp"

namespace bootseer {
namespace {

constexpr unsigned long kImageFlags = MS_RDONLY | MS_NODEV;
constexpr int kLoopAttempts = 16;
// A loop device reads ahead far more than a start uses; with EROFS's own this much is best.
constexpr int kLoopReadAheadKib = 128;

bool try_mount(const std::string& source, const std::string& target, const char* options) {
  return ::mount(source.c_str(), target.c_str(), "erofs", kImageFlags, options) == 0;
}

std::string mount_by_loop(const std::string& image_path, const std::string& target) {
  const UniqueFd image(::open(image_path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!image) throw_errno(image_path);
  const UniqueFd control(::open("/dev/loop-control", O_RDWR | O_CLOEXEC));
  if (!control) throw_errno("/dev/loop-control");
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
    if (!try_mount(device, target, "")) throw_errno("mount " + image_path + " by " + device);
    std::ofstream("/sys/block/loop" + std::to_string(number) + "/queue/read_ahead_kb") << kLoopReadAheadKib;
    return "loop:" + device;
  }
  throw Error(Errc::internal, "no loop device could be had");
}

}  // namespace

std::string mount_erofs(const std::string& image_path, const std::string& target) {
  if (try_mount(image_path, target, "directio")) return "file+directio";
  if (try_mount(image_path, target, "")) return "file";
  // ENOTBLK: a kernel before 6.12 wants a block device. ENOENT, ENOTDIR, EPERM … a loop would not cure.
  if (errno != ENOTBLK && errno != EINVAL) throw_errno("mount " + image_path + " on " + target);
  return mount_by_loop(image_path, target);
}

void mount_overlay(const std::vector<std::string>& lower, const std::string& upper, const std::string& work,
                   const std::string& target) {
  std::string options = "lowerdir=";
  for (std::size_t i = 0; i < lower.size(); ++i) options += (i == 0 ? "" : ":") + lower[i];
  options += ",upperdir=" + upper + ",workdir=" + work;
  if (::mount("overlay", target.c_str(), "overlay", 0, options.c_str()) != 0)
    throw_errno("mount overlay on " + target);
}

void mount_bind(const std::string& source, const std::string& target, bool recursive, bool read_only) {
  const auto flags = static_cast<unsigned long>(recursive ? MS_BIND | MS_REC : MS_BIND);
  if (::mount(source.c_str(), target.c_str(), nullptr, flags, nullptr) != 0) {
    throw_errno("bind " + source + " on " + target);
  }
  if (!read_only) return;
  if (::mount(nullptr, target.c_str(), nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY, nullptr) != 0) {
    const int saved = errno;
    ::umount2(target.c_str(), MNT_DETACH);
    errno = saved;
    throw_errno("read-only bind on " + target);
  }
}

void unmount(const std::string& target, bool lazy) {
  if (::umount2(target.c_str(), UMOUNT_NOFOLLOW | (lazy ? MNT_DETACH : 0)) != 0)
    throw_errno("umount " + target);
}

}  // namespace bootseer
