// Requests that were read from the device and not answered yet, in a file that survives the process.
//
// Kernels before 6.9 do not send unanswered requests again; a successor answers those that this journal names.
// A file of fixed slots, mapped shared: a crash of the process loses nothing that was stored (a crash of the machine
// ends the mount anyway, so nothing is synced).
#pragma once

#include <atomic>
#include <bootseer/fd.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace bootseer {

class RequestJournal {
 public:
  static constexpr std::size_t kSlots = 1024;
  static constexpr std::size_t kSlotBytes = 1024;
  static constexpr std::size_t kMaxRequestBytes = kSlotBytes - 16;

  // Opens or creates the file; what it holds is what a predecessor left. Throws std::system_error.
  explicit RequestJournal(const std::string& path);
  ~RequestJournal();
  RequestJournal(const RequestJournal&) = delete;
  RequestJournal& operator=(const RequestJournal&) = delete;

  // Remembers a request (its bytes as read from the device). A request that is too long or finds no slot is not
  // remembered: false.
  bool begin(std::uint64_t unique, std::span<const std::byte> request) noexcept;
  void end(std::uint64_t unique) noexcept;

  // Takes out everything that is in the journal. Not concurrently with begin() and end().
  std::vector<std::vector<std::byte>> take_all();

 private:
  struct Slot {
    std::atomic<std::uint64_t> unique;  // 0: free; kClaimed: being written
    std::uint32_t length;
    std::uint32_t reserved;
    std::byte request[kMaxRequestBytes];
  };
  static_assert(sizeof(Slot) == kSlotBytes);
  static constexpr std::uint64_t kClaimed = ~0ULL;
  static constexpr std::size_t kProbes = 64;

  Slot& slot(std::uint64_t unique, std::size_t probe) noexcept {
    return slots_[(unique * 0x9E3779B97F4A7C15ULL + probe) % kSlots];
  }

  Slot* slots_ = nullptr;
};

}  // namespace bootseer
