// A reader that is never the bottleneck, for benches.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bootseer/error.hpp>
#include <bootseer/fd.hpp>
#include <chrono>
#include <cstdint>
#include <random>
#include <string>

namespace bootseer::testing {

struct ReadLoopResult {
  std::uint64_t reads = 0;
  std::uint64_t bytes = 0;
  double elapsed_s = 0;
};

// Reads blocks of `block_bytes`, at random block-aligned places or one after the other from a place that the
// seed picks (starting over at the end), for `duration_s`. Throws std::system_error at the first failed or
// short read.
inline ReadLoopResult read_loop(const std::string& path, bool direct, bool random, std::size_t block_bytes,
                                double duration_s, std::uint32_t seed) {
  using Clock = std::chrono::steady_clock;
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0)));
  if (!file) throw_errno("cannot open " + path);
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw_errno("cannot stat " + path);
  const auto blocks = static_cast<std::uint64_t>(status.st_size) / block_bytes;
  if (blocks == 0) throw Error(Errc::usage, path + " is smaller than one block");
  void* buffer = ::mmap(nullptr, block_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (buffer == MAP_FAILED) throw_errno("cannot allocate a buffer");
  std::mt19937_64 chance(seed);
  std::uint64_t block = chance() % blocks;
  ReadLoopResult result;
  const auto began = Clock::now();
  const auto until =
      began + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(duration_s));
  auto now = began;
  do {
    block = random ? chance() % blocks : (block + 1) % blocks;
    const ssize_t got = ::pread(file.get(), buffer, block_bytes, static_cast<off_t>(block * block_bytes));
    if (got != static_cast<ssize_t>(block_bytes)) {
      if (got >= 0) errno = EIO;
      const int failure = errno;
      ::munmap(buffer, block_bytes);
      errno = failure;
      throw_errno("cannot read " + path);
    }
    ++result.reads;
    result.bytes += block_bytes;
    now = Clock::now();
  } while (now < until);
  result.elapsed_s = std::chrono::duration<double>(now - began).count();
  ::munmap(buffer, block_bytes);
  return result;
}

}  // namespace bootseer::testing
