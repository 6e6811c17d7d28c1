#include "bootseer/read_whole_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "bootseer/error.hpp"
#include "bootseer/fd.hpp"
#include "bootseer/transfer.hpp"

namespace bootseer {

std::vector<std::byte> read_whole_file(const std::string& path, std::uint64_t max_bytes) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) throw_errno("open " + path);
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) throw_errno("stat " + path);
  std::vector<std::byte> bytes(static_cast<std::size_t>(
      std::min<std::uint64_t>(static_cast<std::uint64_t>(status.st_size), max_bytes)));
  const ssize_t got = pread_all(fd.get(), bytes, 0);
  if (got < 0) throw_errno("read " + path, static_cast<int>(-got));
  bytes.resize(static_cast<std::size_t>(got));
  return bytes;
}

}  // namespace bootseer
