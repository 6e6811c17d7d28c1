// What a session keeps on disk so that another process can go on with its mount:
// docs/formats/session-state.md. All of it has to survive the death of the process, none of it the death of
// the machine (which ends the mount).
#pragma once

#include <bootseer/fd.hpp>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace bootseer {

// Memory shared with a file (or anonymous, when the path is empty), zero where nothing was written.
class SharedMapping {
 public:
  SharedMapping() noexcept = default;
  SharedMapping(const std::string& path, std::size_t bytes);
  SharedMapping(SharedMapping&& other) noexcept;
  SharedMapping& operator=(SharedMapping&& other) noexcept;
  ~SharedMapping();
  std::span<std::byte> bytes() const noexcept { return {data_, size_}; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// The INIT exchange: request as the kernel sent it, reply as the kernel got it.
struct InitRecord {
  std::vector<std::byte> request;
  std::vector<std::byte> reply;

  std::vector<std::byte> serialize() const;
  // Throws Error(integrity).
  static InitRecord parse(std::span<const std::byte> bytes);

  // Atomic: an older record is there, or this one.
  void save(const std::string& path) const;
  // Empty when there is no such file.
  static std::optional<InitRecord> load(const std::string& path);
};

// Requests in flight, for kernels that cannot resend them. A reader thread lets the kernel write each request
// straight into a slot of this shared mapping, so that no instant exists at which a request is neither in the
// kernel's queue nor here. A slot is cleared after its request was answered; answering twice is harmless.
class Journal {
 public:
  static constexpr std::size_t kSlotBytes = 4096;
  static constexpr int kNoSlot = -1;

  // Opens or creates; slots that hold a request stay taken.
  explicit Journal(const std::string& path, std::size_t slots = 1024);

  // A free slot, or kNoSlot: then this one request is not journaled.
  int acquire() noexcept;
  void release(int slot) noexcept;
  std::span<std::byte> slot(int index) noexcept;
  void clear(int slot) noexcept;

  struct Entry {
    int slot;
    std::size_t bytes;  // may exceed kSlotBytes: then the tail is lost
  };
  // What the previous process left behind.
  std::vector<Entry> pending() const;

 private:
  SharedMapping mapping_;
  std::mutex mutex_;
  std::vector<int> free_;
};

// How often each node is open, and in which mode: the kernel wants all opens of an inode to agree on
// passthrough and on the backing id. Counts may be too high after a crash (an open stays in its mode for
// longer than needed), never too low.
class OpenTable {
 public:
  struct Mode {
    bool passthrough = false;
    std::int32_t backing_id = 0;
  };

  explicit OpenTable(const std::string& path, std::size_t capacity = 16384);

  // Registers one more open. The first open of a node decides the mode with `decide()` → Mode; later ones get
  // it.
  template <class Decide>
  Mode open(std::uint64_t nodeid, Decide&& decide) {
    const std::lock_guard lock(mutex_);
    const auto found = index_.find(nodeid);
    if (found != index_.end()) return open_again(found->second);
    if (!can_track()) return {};
    return open_first(nodeid, overflowed() ? Mode{} : decide());
  }
  // Takes one open back; returns the backing id to close if that was the last one.
  std::optional<std::int32_t> close(std::uint64_t nodeid);

  bool is_passthrough(std::uint64_t nodeid) const;
  std::size_t size() const;

 private:
  bool can_track();
  bool overflowed() const;
  Mode open_again(std::size_t index);
  Mode open_first(std::uint64_t nodeid, Mode mode);

  SharedMapping mapping_;
  mutable std::mutex mutex_;
  std::unordered_map<std::uint64_t, std::size_t> index_;
  std::vector<std::size_t> free_;
};

}  // namespace bootseer
