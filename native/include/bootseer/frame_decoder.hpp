#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "bootseer/chunk_map.hpp"

namespace bootseer {

// Turns the blob bytes of a chunk into verified raw bytes. One per thread.
class FrameDecoder {
 public:
  FrameDecoder();
  ~FrameDecoder();
  FrameDecoder(const FrameDecoder&) = delete;
  FrameDecoder& operator=(const FrameDecoder&) = delete;

  enum class Result { ok, bad_frame, digest_mismatch };

  // On ok `raw` views the chunk's bytes, valid until the next call. The output buffer has exactly raw_bytes,
  // so a frame that expands to more fails.
  Result decode(const Chunk& chunk, std::span<const std::byte> blob, std::span<const std::byte>& raw);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace bootseer
