// Verified chunks of one blob on local disk: a sparse file and an append-only log of what is in it.
// docs/formats/cache.md says what is on disk and why it survives crashes and sharing.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "bootseer/cache_log.hpp"
#include "bootseer/chunk_map.hpp"
#include "bootseer/fd.hpp"

namespace bootseer {

struct CacheStatistics {
  std::uint64_t write_failures = 0;     // chunks that the disk refused (full, I/O error)
  std::uint64_t log_failures = 0;       // records that the disk refused
  std::uint64_t sync_failures = 0;      // failed fdatasync; nothing is called durable afterwards
  std::uint64_t corrupt_chunks = 0;     // claimed chunks whose bytes were wrong or unreadable
  std::uint64_t verified_chunks = 0;    // claimed chunks that were checked on their first hit
  std::uint64_t log_dropped_bytes = 0;  // torn tail found at opening
  int last_errno = 0;                   // of the last failure
};

// Thread safe. Any number of processes may open the same blob: all write verified bytes to where they belong,
// so that the order of writes does not matter, and each appends its own records.
class CacheBlob {
 public:
  // Throws std::system_error, or Error(usage) when another process uses the directory with another map.
  CacheBlob(const std::string& directory, std::shared_ptr<const ChunkMap> map);
  ~CacheBlob();
  CacheBlob(const CacheBlob&) = delete;
  CacheBlob& operator=(const CacheBlob&) = delete;

  // Its bytes were verified by this process (or are zeros by definition).
  bool is_ready(std::uint32_t chunk) const noexcept {
    return (ready_[chunk / 64].load(std::memory_order_acquire) >> (chunk % 64) & 1) != 0;
  }
  // Ready, or claimed by the log. A claimed chunk becomes ready by prove().
  bool is_present(std::uint32_t chunk) const noexcept {
    return is_ready(chunk) || claims_[chunk].load(std::memory_order_acquire) != kAbsent;
  }
  // Checks a claimed chunk: by CRC where the log proves that its data was on disk first, else by SHA-256.
  // What is wrong is forgotten. Returns is_ready().
  bool prove(std::uint32_t chunk) noexcept;

  // Reads image bytes from the data file. False (errno set) unless all were read.
  bool read(std::uint64_t offset, std::span<std::byte> out) noexcept;

  // Stores verified bytes and makes the chunk ready. False when the disk refuses; it then refuses without
  // trying for a moment, so that a full disk does not cost a system call per chunk.
  bool put(std::uint32_t chunk, std::span<const std::byte> raw) noexcept;

  // Forgets a chunk whose bytes turned out unreadable or wrong.
  void drop(std::uint32_t chunk) noexcept;

  // Learns what other processes have recorded since. True when there was something.
  bool refresh() noexcept;

  // Tells the other processes that we fetch this (any number that all of them give the same thing). False
  // when somebody else is at it; ends with release_fetch, close, or the death of the process.
  bool claim_fetch(std::uint32_t id) noexcept;
  void release_fetch(std::uint32_t id) noexcept;

  // Makes durable what is recorded so far. Cache calls it from time to time.
  void sync() noexcept;

  // Syncs and gives the lock back. Reading stays possible until destruction; nothing is recorded any more.
  void close() noexcept;

  bool is_refusing() const noexcept;             // put() would fail without trying at the moment
  bool is_complete() const noexcept;             // every chunk is ready, or claimed and proven durable
  std::uint64_t present_bytes() const noexcept;  // raw bytes of present chunks
  const std::string& data_path() const noexcept { return data_path_; }
  int data_fd() const noexcept { return data_.get(); }
  CacheStatistics statistics() const noexcept;

 private:
  bool set_claim(std::uint32_t id, short type) noexcept;  // false: errno says why
  enum Claim : std::uint8_t { kAbsent = 0, kUnproven = 1, kProven = 2 };

  void open_files();
  void open_data(bool alone);
  bool open_log(bool alone);
  void rewrite_log();
  bool is_current() const noexcept;
  void replay_from_file();
  bool catch_up_locked();
  void settle(std::uint32_t chunk) noexcept;
  void settle_all() noexcept;
  void claim_unrecorded_data() noexcept;
  void distrust_all() noexcept;
  void set_ready(std::uint32_t chunk) noexcept;
  void append(cache_log::Kind kind, std::uint32_t value, std::uint32_t data_crc) noexcept;
  void failed(std::atomic<std::uint64_t>& counter, int error) noexcept;

  const std::shared_ptr<const ChunkMap> map_owner_;
  const ChunkMap& map_;
  const std::string directory_;
  const std::string data_path_;
  const std::string log_path_;
  UniqueFd lock_;
  UniqueFd fetch_claims_;  // an empty file: byte i locked means that i is being fetched
  UniqueFd data_;
  UniqueFd log_;
  std::vector<std::atomic<std::uint64_t>> ready_;
  std::vector<std::atomic<std::uint8_t>> claims_;
  std::vector<std::atomic<std::uint32_t>> data_crcs_;  // of claimed chunks; written before the claim

  std::mutex sync_mutex_;  // one sync at a time; taken before log_mutex_
  bool may_call_durable_ = true;
  std::mutex log_mutex_;  // guards the four below
  bool log_is_broken_ = false;
  cache_log::Replay replay_;
  std::uint64_t replayed_bytes_ = 0;  // offset in the log up to which replay_ has gone
  std::uint64_t own_bytes_ = 0;       // appended by us beyond that

  std::atomic<bool> closed_{false};
  std::atomic<std::int64_t> refusing_until_ns_{0};
  std::atomic<std::uint64_t> write_failures_{0};
  std::atomic<std::uint64_t> log_failures_{0};
  std::atomic<std::uint64_t> sync_failures_{0};
  std::atomic<std::uint64_t> corrupt_chunks_{0};
  std::atomic<std::uint64_t> verified_chunks_{0};
  std::atomic<std::uint64_t> log_dropped_bytes_{0};
  std::atomic<int> last_errno_{0};
};

}  // namespace bootseer
