#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace bootseer {

// The file's first `max_bytes` bytes (all, when it is shorter). Throws std::system_error.
std::vector<std::byte> read_whole_file(const std::string& path, std::uint64_t max_bytes);

}  // namespace bootseer
