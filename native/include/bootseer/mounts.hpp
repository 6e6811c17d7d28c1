// The mount calls that Python lacks. All throw std::system_error with the paths in its message.
#pragma once

#include <string>
#include <vector>

namespace bootseer {

// What to mount an image file by.
enum class ErofsMount {
  any,   // the first that works
  file,  // the file itself: Linux 6.12, and at most one overlay on top (the kernel's stacking limit)
  loop,  // a loop device: any kernel, no limit, more read-ahead and a second page cache
};

// Mounts an EROFS image file read-only. Returns how: "file+directio", "file" or "loop:/dev/loopN"; the loop
// device goes away with the mount. Never by mount(8), which would slip in a loop device. Error(integrity) for
// a file that is no EROFS image.
std::string mount_erofs(const std::string& image_path, const std::string& target, ErofsMount by);

// `lower`: top first. Paths may hold any byte.
void mount_overlay(const std::vector<std::string>& lower, const std::string& upper, const std::string& work,
                   const std::string& target);

// `read_only` covers everything below, too, when `recursive`.
void mount_bind(const std::string& source, const std::string& target, bool recursive, bool read_only);

void unmount(const std::string& target, bool lazy);

}  // namespace bootseer
