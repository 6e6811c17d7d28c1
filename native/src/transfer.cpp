#include "bootseer/transfer.hpp"

#include <unistd.h>

#include <cerrno>

namespace bootseer {
namespace {

// `put` writes the rest, which begins that many bytes into the whole.
template <typename Put>
int all(std::span<const std::byte> bytes, Put&& put) noexcept {
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t written = put(bytes.subspan(done), done);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    if (written == 0) return ENOSPC;
    done += static_cast<std::size_t>(written);
  }
  return 0;
}

}  // namespace

int write_all(int fd, std::span<const std::byte> bytes) noexcept {
  return all(bytes, [fd](auto rest, std::size_t) { return ::write(fd, rest.data(), rest.size()); });
}

int pwrite_all(int fd, std::span<const std::byte> bytes, std::uint64_t offset) noexcept {
  return all(bytes, [fd, offset](auto rest, std::size_t done) {
    return ::pwrite(fd, rest.data(), rest.size(), static_cast<off_t>(offset + done));
  });
}

ssize_t pread_all(int fd, std::span<std::byte> out, std::uint64_t offset) noexcept {
  std::size_t filled = 0;
  while (filled < out.size()) {
    const ssize_t got =
        ::pread(fd, out.data() + filled, out.size() - filled, static_cast<off_t>(offset + filled));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return -errno;
    if (got == 0) break;
    filled += static_cast<std::size_t>(got);
  }
  return static_cast<ssize_t>(filled);
}

}  // namespace bootseer
