#include <fcntl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <bootseer/error.hpp>
#include <bootseer/session_mount.hpp>
#include <charconv>
#include <climits>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace bootseer {
namespace {

// mountinfo writes blanks, tabs, newlines and backslashes as \ooo.
std::string unescape(const std::string& text) {
  std::string plain;
  for (std::size_t at = 0; at < text.size(); ++at) {
    unsigned code = 0;
    if (text[at] == '\\' && at + 3 < text.size() &&
        std::from_chars(text.data() + at + 1, text.data() + at + 4, code, 8).ptr == text.data() + at + 4) {
      plain += static_cast<char>(code);
      at += 3;
    } else {
      plain += text[at];
    }
  }
  return plain;
}

void check_option(const std::string& value, const char* what) {
  if (value.empty() || value.find_first_of(",\\\n") != std::string::npos) {
    throw Error(Errc::usage,
                std::string(what) + " must not be empty or contain a comma, backslash or newline");
  }
}

}  // namespace

UniqueFd mount_fuse(const MountRequest& request) {
  check_option(request.fsname, "fsname");
  check_option(request.subtype, "subtype");
  struct stat status {};
  if (::stat(request.mountpoint.c_str(), &status) != 0) throw_errno("cannot stat " + request.mountpoint);
  UniqueFd device(::open("/dev/fuse", O_RDWR | O_CLOEXEC));
  if (!device) throw_errno("cannot open /dev/fuse");
  std::ostringstream options;
  options << "fd=" << device.get() << ",rootmode=" << std::oct << (status.st_mode & S_IFMT) << std::dec
          << ",user_id=" << ::getuid() << ",group_id=" << ::getgid() << ",default_permissions"
          << ",max_read=" << request.max_read_bytes;
  if (request.allow_other) options << ",allow_other";
  const unsigned long flags =
      MS_NOSUID | MS_NODEV | (request.read_only ? static_cast<unsigned long>(MS_RDONLY) : 0UL);
  const auto type = "fuse." + request.subtype;
  if (::mount(request.fsname.c_str(), request.mountpoint.c_str(), type.c_str(), flags,
              options.str().c_str()) != 0) {
    throw_errno("cannot mount on " + request.mountpoint);
  }
  return device;
}

void unmount_fuse(const std::string& mountpoint, bool lazy) {
  if (::umount2(mountpoint.c_str(), lazy ? UMOUNT_NOFOLLOW | MNT_DETACH : UMOUNT_NOFOLLOW) != 0) {
    throw_errno("cannot unmount " + mountpoint);
  }
}

std::optional<DeviceNumber> find_mount(const std::string& mountinfo, const std::string& mountpoint) {
  std::optional<DeviceNumber> found;
  std::istringstream lines(mountinfo);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    std::string id, parent, device, root, target;
    if (!(fields >> id >> parent >> device >> root >> target) || unescape(target) != mountpoint) continue;
    DeviceNumber number;
    const char* end = device.data() + device.size();
    const auto major = std::from_chars(device.data(), end, number.major);
    if (major.ec != std::errc{} || major.ptr == end || *major.ptr != ':') continue;
    if (std::from_chars(major.ptr + 1, end, number.minor).ec != std::errc{}) continue;
    found = number;  // later lines are on top
  }
  return found;
}

std::optional<DeviceNumber> find_mount(const std::string& mountpoint) {
  std::ifstream file("/proc/self/mountinfo");
  std::ostringstream text;
  text << file.rdbuf();
  return find_mount(text.str(), mountpoint);
}

std::optional<std::uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  if (!(file >> value)) return std::nullopt;
  return value;
}

int write_number(const std::string& path, std::uint64_t value) {
  UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  if (!fd) return errno;
  const auto text = std::to_string(value);
  return ::write(fd.get(), text.data(), text.size()) < 0 ? errno : 0;
}

}  // namespace bootseer
