// A file made of chunks that live somewhere else, cached and verified.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bootseer/cache.hpp"
#include "bootseer/chunk_map.hpp"
#include "bootseer/fetcher.hpp"
#include "bootseer/read_file.hpp"
#include "bootseer/source.hpp"
#include "bootseer/statistics.hpp"
#include "bootseer/trace.hpp"
#include "bootseer/trace_recorder.hpp"

namespace bootseer {

struct BlockFileOptions {
  std::string trace_path;  // empty: no trace
  bool record = true;
  FetcherOptions fetcher;
};

class BlockFile final : public ReadFile {
 public:
  // `key` names the cached blob (hex digest). Throws what Cache::open_blob throws.
  BlockFile(Cache& cache, const std::string& key, std::shared_ptr<const ChunkMap> map,
            std::shared_ptr<Source> source, const BlockFileOptions& options);
  ~BlockFile() override;

  std::uint64_t size() const noexcept override { return map_.image_bytes(); }
  ssize_t try_read(std::uint64_t offset, std::size_t length, const ReadContext& context,
                   std::span<std::byte> scratch, iovec& out) noexcept override;
  void read(std::uint64_t offset, std::size_t length, const ReadContext& context,
            std::unique_ptr<ReadReply> reply) noexcept override;

  // Blocks. Fewer bytes than asked for only at the end of the file. Throws Error.
  std::vector<std::byte> pread(std::uint64_t offset, std::size_t length);

  // Fetch these chunks, earliest first use first. Replaces what is left of an earlier plan.
  void prefetch(std::span<const PlanEntry> plan) { fetcher_->set_plan(plan); }
  // The workload says that it is ready: recording ends, the rest of the blob may be filled.
  void mark_ready() noexcept;

  // Every byte is in local_path(), verified or proven durable.
  bool is_complete() const noexcept { return blob_->is_complete(); }
  const std::string& local_path() const noexcept { return blob_->data_path(); }
  std::uint64_t ready_bytes() const noexcept { return blob_->present_bytes(); }
  Statistics statistics() const;

  // Waiting reads fail; later ones do unless their bytes are here. Idempotent.
  void close() noexcept;

 private:
  void read_with(std::uint64_t offset, std::size_t length, const ReadContext& context,
                 std::unique_ptr<ReadReply> reply, std::shared_ptr<ReadFailure> failure) noexcept;
  void note_touch(std::uint64_t offset, std::size_t length, std::uint32_t first, std::uint32_t last,
                  std::uint32_t pid) noexcept;

  const std::shared_ptr<const ChunkMap> map_owner_;
  const ChunkMap& map_;
  const std::shared_ptr<Source> source_;
  const std::shared_ptr<CacheBlob> blob_;
  std::unique_ptr<TraceRecorder> recorder_;
  std::unique_ptr<Fetcher> fetcher_;
  std::atomic<std::uint64_t> hits_{0};
  std::atomic<std::uint64_t> misses_{0};
  std::atomic<std::uint64_t> read_bytes_{0};
};

}  // namespace bootseer
