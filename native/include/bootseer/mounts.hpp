// The mount calls that Python lacks.
#pragma once

#include <string>
#include <vector>

namespace bootseer {

// Mounts an EROFS image file read-only. Returns how: "file+directio", "file" (Linux 6.12) or
// "loop:/dev/loopN". Never by mount(8), which would slip in a loop device.
std::string mount_erofs(const std::string& image_path, const std::string& target);

void mount_overlay(const std::vector<std::string>& lower, const std::string& upper, const std::string& work,
                   const std::string& target);
void mount_bind(const std::string& source, const std::string& target, bool recursive, bool read_only);
void unmount(const std::string& target, bool lazy);

}  // namespace bootseer
