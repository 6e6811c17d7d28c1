#pragma once

#include <bootseer/fd.hpp>
#include <bootseer/read_file.hpp>
#include <string>

namespace bootseer {

// A complete local regular file, whose size is taken when it is opened.
//
// Bytes are read with pread, not viewed through a mapping: should the file shrink or its disk fail, a view
// would make the kernel fail the reply after it has consumed the request, where pread just returns an error.
class LocalFile final : public ReadFile {
 public:
  // Throws std::system_error when the path cannot be opened, Error(usage) when it is not a regular file.
  // `passthrough` offers the file to the kernel (see ReadFile::backing_fd).
  LocalFile(const std::string& path, bool passthrough);

  std::uint64_t size() const noexcept override { return size_; }
  ssize_t try_read(std::uint64_t offset, std::size_t length, const ReadContext& context,
                   std::span<std::byte> scratch, iovec& out) noexcept override;
  void read(std::uint64_t offset, std::size_t length, const ReadContext& context,
            std::unique_ptr<ReadReply> reply) noexcept override;
  int backing_fd() const noexcept override { return passthrough_ ? fd_.get() : -1; }

 private:
  UniqueFd fd_;
  std::uint64_t size_ = 0;
  bool passthrough_;
};

}  // namespace bootseer
