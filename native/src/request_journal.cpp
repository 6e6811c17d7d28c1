#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <bootseer/error.hpp>
#include <bootseer/request_journal.hpp>
#include <cstring>

namespace bootseer {

RequestJournal::RequestJournal(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!fd) throw_errno(path);
  if (::ftruncate(fd.get(), static_cast<off_t>(kSlots * kSlotBytes)) != 0) throw_errno(path);
  void* memory = ::mmap(nullptr, kSlots * kSlotBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) throw_errno(path);
  slots_ = static_cast<Slot*>(memory);
}

RequestJournal::~RequestJournal() { ::munmap(slots_, kSlots * kSlotBytes); }

bool RequestJournal::begin(std::uint64_t unique, std::span<const std::byte> request) noexcept {
  if (request.size() > kMaxRequestBytes) return false;
  for (std::size_t probe = 0; probe < kProbes; ++probe) {
    Slot& candidate = slot(unique, probe);
    std::uint64_t free = 0;
    if (!candidate.unique.compare_exchange_strong(free, kClaimed, std::memory_order_acquire)) continue;
    candidate.length = static_cast<std::uint32_t>(request.size());
    std::memcpy(candidate.request, request.data(), request.size());
    candidate.unique.store(unique, std::memory_order_release);
    return true;
  }
  return false;
}

void RequestJournal::end(std::uint64_t unique) noexcept {
  for (std::size_t probe = 0; probe < kProbes; ++probe) {
    std::uint64_t expected = unique;
    if (slot(unique, probe).unique.compare_exchange_strong(expected, 0, std::memory_order_release)) return;
  }
}

std::vector<std::vector<std::byte>> RequestJournal::take_all() {
  std::vector<std::vector<std::byte>> requests;
  for (std::size_t i = 0; i < kSlots; ++i) {
    Slot& used = slots_[i];
    const std::uint64_t unique = used.unique.exchange(0);
    if (unique == 0 || unique == kClaimed) continue;  // claimed: the writer died before the request was whole
    const std::size_t length = std::min<std::size_t>(used.length, kMaxRequestBytes);
    requests.emplace_back(used.request, used.request + length);
  }
  return requests;
}

}  // namespace bootseer
