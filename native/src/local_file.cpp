#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bootseer/error.hpp>
#include <bootseer/local_file.hpp>
#include <bootseer/transfer.hpp>
#include <cerrno>
#include <vector>

namespace bootseer {

LocalFile::LocalFile(const std::string& path, bool passthrough)
    : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)), passthrough_(passthrough) {
  if (!fd_) throw_errno("cannot open " + path);
  struct stat status {};
  if (::fstat(fd_.get(), &status) != 0) throw_errno("cannot stat " + path);
  if (!S_ISREG(status.st_mode)) throw Error(Errc::usage, path + " is not a regular file");
  size_ = static_cast<std::uint64_t>(status.st_size);
}

ssize_t LocalFile::try_read(std::uint64_t offset, std::size_t length, const ReadContext&,
                            std::span<std::byte> scratch, iovec& out) noexcept {
  if (offset >= size_) return 0;
  const auto wanted = static_cast<std::size_t>(std::min<std::uint64_t>(length, size_ - offset));
  const ssize_t got = pread_all(fd_.get(), scratch.first(wanted), offset);
  if (got < 0) return got;
  if (static_cast<std::size_t>(got) < wanted) return -EIO;  // the file shrank under us: its bytes are gone
  out = {scratch.data(), wanted};
  return got;
}

void LocalFile::read(std::uint64_t offset, std::size_t length, const ReadContext& context,
                     std::unique_ptr<ReadReply> reply) noexcept {
  try {
    std::vector<std::byte> scratch(length);
    iovec view{};
    const ssize_t got = try_read(offset, length, context, scratch, view);
    if (got < 0) {
      reply->error(static_cast<int>(-got));
    } else {
      view.iov_len = static_cast<std::size_t>(got);
      reply->data({&view, got > 0 ? 1U : 0U});
    }
  } catch (const std::bad_alloc&) {
    reply->error(ENOMEM);
  }
}

}  // namespace bootseer
