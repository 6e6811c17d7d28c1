#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bootseer/error.hpp>
#include <bootseer/fuse_abi.hpp>
#include <bootseer/session_state.hpp>
#include <bootseer/transfer.hpp>
#include <cstring>
#include <utility>

namespace bootseer {
namespace {

constexpr std::array<char, 8> kInitMagic = {'B', 'S', 'R', 'I', 'N', 'I', 'T', '1'};
constexpr std::array<char, 8> kOpensMagic = {'B', 'S', 'R', 'O', 'P', 'E', 'N', '1'};
constexpr std::size_t kMaxInitBytes = 4096;  // an INIT message is about 100 bytes

struct InitFileHeader {
  std::array<char, 8> magic;
  std::uint32_t request_bytes;
  std::uint32_t reply_bytes;
  std::uint64_t xxh64;  // of the payload
};
static_assert(sizeof(InitFileHeader) == 24);

struct OpenEntry {
  std::uint64_t nodeid;
  std::uint32_t opens;  // 0: free
  std::int32_t backing_id;
  std::uint32_t passthrough;
  std::uint32_t reserved[3];
};
static_assert(sizeof(OpenEntry) == 32);

struct OpensHeader {
  std::array<char, 8> magic;
  std::uint32_t overflowed;  // some open is not in the table: no node may enter passthrough any more
  std::uint32_t reserved[5];
};
static_assert(sizeof(OpensHeader) == sizeof(OpenEntry));

// Another process reads these words after we died, so the compiler must not reorder or drop the stores.
void publish(std::uint32_t& word, std::uint32_t value) {
  std::atomic_ref<std::uint32_t>(word).store(value, std::memory_order_release);
}

OpenEntry* entries(const SharedMapping& mapping) {
  return reinterpret_cast<OpenEntry*>(mapping.bytes().data());
}

}  // namespace

SharedMapping::SharedMapping(const std::string& path, std::size_t bytes) : size_(bytes) {
  UniqueFd fd;
  if (!path.empty()) {
    fd.reset(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!fd) throw_errno("cannot open " + path);
    struct stat status {};
    if (::fstat(fd.get(), &status) != 0) throw_errno("cannot stat " + path);
    if (static_cast<std::size_t>(status.st_size) != bytes &&
        (::ftruncate(fd.get(), 0) != 0 || ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0)) {
      throw_errno("cannot size " + path);
    }
  }
  const int flags = path.empty() ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd.get(), 0);
  if (mapped == MAP_FAILED) throw_errno("cannot map " + path);
  data_ = static_cast<std::byte*>(mapped);
  if (path.empty()) return;
  // Every page is written to now (MAP_POPULATE only reads): should the kernel have to fault one in while it
  // copies a request here and the process is being killed, it would fail the request.
  constexpr std::size_t kPageBytes = 4096;
  for (std::size_t offset = 0; offset < bytes; offset += kPageBytes) {
    std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(data_ + offset)).fetch_or(0);
  }
}

SharedMapping::SharedMapping(SharedMapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

SharedMapping& SharedMapping::operator=(SharedMapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

SharedMapping::~SharedMapping() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

std::vector<std::byte> InitRecord::serialize() const {
  InitFileHeader header{kInitMagic, static_cast<std::uint32_t>(request.size()),
                        static_cast<std::uint32_t>(reply.size()), 0};
  std::vector<std::byte> bytes(sizeof(header) + request.size() + reply.size());
  const auto payload = std::span(bytes).subspan(sizeof(header));
  std::copy(reply.begin(), reply.end(), std::copy(request.begin(), request.end(), payload.begin()));
  header.xxh64 = XXH64(payload.data(), payload.size(), 0);
  std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

InitRecord InitRecord::parse(std::span<const std::byte> bytes) {
  InitFileHeader header{};
  if (bytes.size() < sizeof(header)) throw Error(Errc::integrity, "session record is cut short");
  std::memcpy(&header, bytes.data(), sizeof(header));
  const auto payload = bytes.subspan(sizeof(header));
  if (header.magic != kInitMagic) throw Error(Errc::integrity, "session record has an unknown format");
  if (header.request_bytes > kMaxInitBytes || header.reply_bytes > kMaxInitBytes ||
      payload.size() != std::size_t{header.request_bytes} + header.reply_bytes) {
    throw Error(Errc::integrity, "session record has impossible lengths");
  }
  if (XXH64(payload.data(), payload.size(), 0) != header.xxh64) {
    throw Error(Errc::integrity, "session record does not match its checksum");
  }
  const auto request = payload.first(header.request_bytes);
  const auto reply = payload.subspan(header.request_bytes);
  return {{request.begin(), request.end()}, {reply.begin(), reply.end()}};
}

void InitRecord::save(const std::string& path) const {
  const auto bytes = serialize();
  const std::string temporary = path + ".new";
  UniqueFd fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (!fd) throw_errno("cannot create " + temporary);
  if (const int error = write_all(fd.get(), bytes); error != 0)
    throw_errno("cannot write " + temporary, error);
  if (::rename(temporary.c_str(), path.c_str()) != 0) throw_errno("cannot rename " + temporary);
}

std::optional<InitRecord> InitRecord::load(const std::string& path) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd && errno == ENOENT) return std::nullopt;
  if (!fd) throw_errno("cannot open " + path);
  std::vector<std::byte> bytes(sizeof(InitFileHeader) + 2 * kMaxInitBytes + 1);
  const ssize_t got = ::read(fd.get(), bytes.data(), bytes.size());
  if (got < 0) throw_errno("cannot read " + path);
  bytes.resize(static_cast<std::size_t>(got));
  return parse(bytes);
}

Journal::Journal(const std::string& path, std::size_t slots) : mapping_(path, slots * kSlotBytes) {
  free_.reserve(slots);
  std::vector<bool> taken(slots);
  for (const auto& entry : pending()) taken[static_cast<std::size_t>(entry.slot)] = true;
  for (std::size_t index = slots; index-- > 0;) {
    if (!taken[index]) free_.push_back(static_cast<int>(index));
  }
}

int Journal::acquire() noexcept {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) return kNoSlot;
  const int slot = free_.back();
  free_.pop_back();
  return slot;
}

void Journal::release(int slot) noexcept {
  if (slot == kNoSlot) return;
  clear(slot);
  const std::lock_guard lock(mutex_);
  free_.push_back(slot);  // never reallocates: room for every slot was reserved
}

std::span<std::byte> Journal::slot(int index) noexcept {
  return mapping_.bytes().subspan(static_cast<std::size_t>(index) * kSlotBytes, kSlotBytes);
}

void Journal::clear(int slot) noexcept {
  // InHeader.len comes first; zero means free.
  publish(*reinterpret_cast<std::uint32_t*>(this->slot(slot).data()), 0);
}

std::vector<Journal::Entry> Journal::pending() const {
  std::vector<Entry> found;
  const auto bytes = mapping_.bytes();
  for (std::size_t offset = 0; offset < bytes.size(); offset += kSlotBytes) {
    fuse::InHeader header{};
    std::memcpy(&header, bytes.data() + offset, sizeof(header));
    if (header.len >= sizeof(header) && header.unique != 0) {
      found.push_back({static_cast<int>(offset / kSlotBytes), header.len});
    }
  }
  return found;
}

OpenTable::OpenTable(const std::string& path, std::size_t capacity)
    : mapping_(path, (capacity + 1) * sizeof(OpenEntry)) {
  OpensHeader header{};
  std::memcpy(&header, mapping_.bytes().data(), sizeof(header));
  if (header.magic != kOpensMagic) {
    std::memset(mapping_.bytes().data(), 0, mapping_.bytes().size());
    std::memcpy(mapping_.bytes().data(), kOpensMagic.data(), kOpensMagic.size());
  }
  for (std::size_t index = capacity; index > 0; --index) {  // entry 0 is the header
    const auto& entry = entries(mapping_)[index];
    if (entry.opens > 0) {
      index_.emplace(entry.nodeid, index);
    } else {
      free_.push_back(index);
    }
  }
}

bool OpenTable::can_track() {
  if (!free_.empty()) return true;
  publish(reinterpret_cast<OpensHeader*>(mapping_.bytes().data())->overflowed, 1);
  return false;
}

bool OpenTable::overflowed() const {
  return reinterpret_cast<const OpensHeader*>(mapping_.bytes().data())->overflowed != 0;
}

OpenTable::Mode OpenTable::open_again(std::size_t index) {
  auto& entry = entries(mapping_)[index];
  publish(entry.opens, entry.opens + 1);
  return {entry.passthrough != 0, entry.backing_id};
}

OpenTable::Mode OpenTable::open_first(std::uint64_t nodeid, Mode mode) {
  const std::size_t index = free_.back();
  index_.emplace(nodeid, index);
  free_.pop_back();
  auto& entry = entries(mapping_)[index];
  entry.nodeid = nodeid;
  entry.backing_id = mode.backing_id;
  entry.passthrough = mode.passthrough ? 1 : 0;
  publish(entry.opens, 1);
  return mode;
}

std::optional<std::int32_t> OpenTable::close(std::uint64_t nodeid) {
  const std::lock_guard lock(mutex_);
  const auto found = index_.find(nodeid);
  if (found == index_.end()) return std::nullopt;
  auto& entry = entries(mapping_)[found->second];
  publish(entry.opens, entry.opens - 1);
  if (entry.opens > 0) return std::nullopt;
  const bool passthrough = entry.passthrough != 0;
  free_.push_back(found->second);
  index_.erase(found);
  return passthrough ? std::optional(entry.backing_id) : std::nullopt;
}

bool OpenTable::is_passthrough(std::uint64_t nodeid) const {
  const std::lock_guard lock(mutex_);
  const auto found = index_.find(nodeid);
  return found != index_.end() && entries(mapping_)[found->second].passthrough != 0;
}

std::size_t OpenTable::size() const {
  const std::lock_guard lock(mutex_);
  return index_.size();
}

}  // namespace bootseer
