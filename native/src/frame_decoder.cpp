#include "bootseer/frame_decoder.hpp"

#include <zstd.h>

#include "bootseer/error.hpp"

namespace bootseer {

struct FrameDecoder::State {
  struct Deleter {
    void operator()(ZSTD_DCtx* owned) const noexcept { ZSTD_freeDCtx(owned); }
  };
  std::unique_ptr<ZSTD_DCtx, Deleter> context{ZSTD_createDCtx()};
  std::unique_ptr<std::byte[]> raw = std::make_unique<std::byte[]>(kMaxChunkBytes);
};

FrameDecoder::FrameDecoder() : state_(std::make_unique<State>()) {
  if (!state_->context) throw Error(Errc::internal, "zstd: out of memory");
}
FrameDecoder::~FrameDecoder() = default;

FrameDecoder::Result FrameDecoder::decode(const Chunk& chunk, std::span<const std::byte> blob,
                                          std::span<const std::byte>& raw) {
  if (chunk.is_stored()) {
    raw = blob.first(chunk.raw_bytes);
  } else {
    const std::size_t size = ZSTD_decompressDCtx(state_->context.get(), state_->raw.get(), chunk.raw_bytes,
                                                 blob.data(), blob.size());
    if (ZSTD_isError(size) != 0 || size != chunk.raw_bytes) return Result::bad_frame;
    raw = std::span(state_->raw.get(), chunk.raw_bytes);
  }
  return sha256(raw) == chunk.sha256 ? Result::ok : Result::digest_mismatch;
}

}  // namespace bootseer
