#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bootseer/error.hpp>
#include <bootseer/fuse_abi.hpp>
#include <bootseer/request_journal.hpp>
#include <bootseer/session.hpp>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <unordered_map>
#include <vector>

namespace bootseer {
namespace {

constexpr std::size_t kBufferSlack = 8192;        // FUSE_MIN_READ_BUFFER: headers beside max_write
constexpr int kSocketBufferBytes = 4 << 20;
constexpr int kWakeSignal = SIGURG;  // ignored by default everywhere; interrupts a blocking read() in our threads

void on_wake(int) {}

std::string join(const std::string& directory, const char* name) { return directory + "/" + name; }

void store(const std::string& path, std::span<const std::byte> bytes) {
  const std::string temporary = path + ".tmp";
  {
    const UniqueFd fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    if (!fd) throw_errno(temporary);
    if (::write(fd.get(), bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) throw_errno(temporary);
  }
  if (::rename(temporary.c_str(), path.c_str()) != 0) throw_errno(path);
}

// Whether the thread that asked is being killed; then an interrupted read must not hold it up.
bool is_dying(std::uint32_t pid) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  if (!status) return true;
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with("SigPnd:") && !line.starts_with("ShdPnd:")) continue;
    if ((std::stoull(line.substr(7), nullptr, 16) & (1ULL << (SIGKILL - 1))) != 0) return true;
  }
  return false;
}

struct MountEntry {
  unsigned major = 0;
  unsigned minor = 0;
  bool found = false;
};

// From mountinfo, not stat(2): stat would ask the control peer, who may be the caller.
MountEntry find_mount(const std::string& mountpoint) {
  std::error_code ignored;
  const std::filesystem::path absolute = std::filesystem::absolute(mountpoint, ignored);
  std::ifstream mounts("/proc/self/mountinfo");
  MountEntry entry;
  for (std::string line; std::getline(mounts, line);) {
    unsigned id = 0;
    unsigned parent = 0;
    unsigned major_number = 0;
    unsigned minor_number = 0;
    char root[2];
    int at = 0;
    if (std::sscanf(line.c_str(), "%u %u %u:%u %1s%n", &id, &parent, &major_number, &minor_number, root, &at) < 5) {
      continue;
    }
    const std::size_t start = line.find(' ', static_cast<std::size_t>(at)) + 1;
    if (line.substr(start, line.find(' ', start) - start) == absolute.lexically_normal().string()) {
      entry = {major_number, minor_number, true};  // the last one is on top
    }
  }
  return entry;
}

std::string read_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

bool write_line(const std::string& path, const std::string& value) {
  std::ofstream file(path);
  file << value << '\n';
  file.flush();
  return static_cast<bool>(file);
}

}  // namespace

class Session::State : public std::enable_shared_from_this<Session::State> {
 public:
  State(UniqueFd device, SessionOptions options) : device_(std::move(device)), options_(std::move(options)) {
    int sockets[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0) throw_errno("socketpair");
    relay_.reset(sockets[0]);
    control_.reset(sockets[1]);
    for (const int fd : sockets) {
      // A message must fit the buffer whole. SO_SNDBUF is silently capped without CAP_NET_ADMIN; then max_write is.
      if (::setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &kSocketBufferBytes, sizeof kSocketBufferBytes) != 0) {
        ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &kSocketBufferBytes, sizeof kSocketBufferBytes);
      }
    }
    int granted = 0;
    socklen_t length = sizeof granted;
    ::getsockopt(relay_.get(), SOL_SOCKET, SO_SNDBUF, &granted, &length);
    options_.max_write_bytes = std::min(options_.max_write_bytes, static_cast<std::uint32_t>(granted) / 4);
    request_bytes_ = options_.max_write_bytes + kBufferSlack;
    if (!options_.state_dir.empty()) {
      std::filesystem::create_directories(options_.state_dir);
      journal_ = std::make_unique<RequestJournal>(join(options_.state_dir, "journal"));
    }
  }

  void start() {
    struct sigaction action {};
    action.sa_handler = on_wake;
    ::sigaction(kWakeSignal, &action, nullptr);
    if (resumed_) replay_init();
    relay_thread_ = std::thread([this] { relay_loop(); });
    for (unsigned i = 0; i < std::max(1U, options_.threads); ++i) {
      readers_.emplace_back([this] { reader_loop(); });
    }
    if (resumed_) resend();
  }

  void stop() noexcept {
    stopping_ = true;
    ::shutdown(relay_.get(), SHUT_RDWR);
    for (std::thread& thread : readers_) {
      // A signal may arrive just before read() blocks, so repeat it until the thread has left.
      while (live_readers_.load() > 0) {
        for (std::thread& other : readers_) {
          if (other.joinable()) ::pthread_kill(other.native_handle(), kWakeSignal);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      if (thread.joinable()) thread.join();
    }
    readers_.clear();
    if (relay_thread_.joinable()) relay_thread_.join();
    const std::lock_guard lock(device_mutex_);
    closed_ = true;
    device_.reset();  // reads still parked find closed_
  }

  // -- replies ---------------------------------------------------------------------------------------------------

  // False when the kernel would not take the data because a page of it could not be read (EFAULT).
  bool answer(std::uint64_t unique, int error, std::span<const iovec> parts) noexcept {
    fuse_out_header header{};
    header.unique = unique;
    header.error = -error;
    std::size_t length = sizeof header;
    std::array<iovec, 17> vector;
    std::size_t count = 1;
    for (const iovec& part : parts) {
      if (count == vector.size()) return false;
      vector[count++] = part;
      length += part.iov_len;
    }
    header.len = static_cast<std::uint32_t>(length);
    vector[0] = {&header, sizeof header};
    for (;;) {
      const ssize_t n = ::writev(device_.get(), vector.data(), static_cast<int>(count));
      if (n >= 0 || errno == ENOENT) break;  // ENOENT: interrupted meanwhile, nobody waits
      if (errno == EINTR || errno == EAGAIN) continue;
      if (errno == EFAULT && !parts.empty()) return false;
      break;  // the connection is gone
    }
    if (journaling_) journal_->end(unique);
    return true;
  }

  // For answers that may come when the session has been stopped.
  void answer_late(std::uint64_t unique, int error, std::span<const iovec> parts) noexcept {
    const std::shared_lock lock(device_mutex_);
    if (closed_) return;
    if (!answer(unique, error, parts)) answer(unique, EIO, {});
    if (error != 0) ++read_errors_;
  }

  bool unpark(std::uint64_t unique) {
    const std::lock_guard lock(parked_mutex_);
    return parked_.erase(unique) > 0;
  }

  std::uint32_t cap_read(std::uint32_t size) const { return std::min(size, options_.max_read_bytes); }

  // -- public state ----------------------------------------------------------------------------------------------

  std::shared_ptr<ReadFile> file(std::uint64_t inode) const {
    const std::shared_lock lock(files_mutex_);
    const auto found = files_.find(inode);
    return found == files_.end() ? nullptr : found->second;
  }

  void add_file(std::uint64_t inode, std::shared_ptr<ReadFile> added) {
    const std::unique_lock lock(files_mutex_);
    files_[inode] = std::move(added);
  }

  void remove_file(std::uint64_t inode) {
    std::shared_ptr<ReadFile> removed;  // destroyed outside the lock
    {
      const std::unique_lock lock(files_mutex_);
      const auto found = files_.find(inode);
      if (found == files_.end()) return;
      removed = std::move(found->second);
      files_.erase(found);
    }
    const std::lock_guard lock(backing_mutex_);
    const auto backing = backings_.find(inode);
    if (backing == backings_.end()) return;
    auto id = static_cast<std::uint32_t>(backing->second);
    ::ioctl(device_.get(), fuse_abi::kBackingClose, &id);
    backings_.erase(backing);
    store_backings();
  }

  std::map<std::string, std::string> info() const {
    std::map<std::string, std::string> values;
    {
      const std::lock_guard lock(info_mutex_);
      values = info_;
    }
    utsname name{};
    ::uname(&name);
    values["kernel"] = name.release;
    values["mountpoint"] = options_.mountpoint;
    values["threads"] = std::to_string(options_.threads);
    values["resumed"] = resumed_ ? "true" : "false";
    const MountEntry mount = find_mount(options_.mountpoint);
    if (mount.found) {
      values["read_ahead_bytes"] = std::to_string(std::atoll(read_line(bdi_path(mount)).c_str()) * 1024);
      const std::string background = read_line(connection_path(mount, "max_background"));
      values["max_background"] = background.empty() ? "unknown (fusectl is not mounted)" : background;
      values["congestion_threshold"] = read_line(connection_path(mount, "congestion_threshold"));
    }
    return values;
  }

  SessionStatistics statistics() const noexcept {
    return {reads_,        parked_reads_, read_bytes_,        read_errors_,          interrupted_,
            forwarded_,    passthrough_opens_, passthrough_failures_, resent_};
  }

  UniqueFd device_;
  UniqueFd relay_;
  UniqueFd control_;
  SessionOptions options_;
  bool resumed_ = false;

 private:
  class Parked;

  static std::string bdi_path(const MountEntry& mount) {
    return "/sys/class/bdi/" + std::to_string(mount.major) + ":" + std::to_string(mount.minor) + "/read_ahead_kb";
  }
  static std::string connection_path(const MountEntry& mount, const char* name) {
    return "/sys/fs/fuse/connections/" + std::to_string(mount.minor) + "/" + name;
  }

  void set_info(const std::string& key, const std::string& value) {
    const std::lock_guard lock(info_mutex_);
    info_[key] = value;
  }

  // -- requests --------------------------------------------------------------------------------------------------

  void reader_loop() {
    ++live_readers_;
    std::vector<std::byte> request(request_bytes_);
    std::vector<std::byte> scratch(options_.max_read_bytes);
    while (!stopping_) {
      const ssize_t n = ::read(device_.get(), request.data(), request.size());
      if (n < 0) {
        if (errno == EINTR || errno == ENOENT || errno == EAGAIN) continue;
        break;  // ENODEV: unmounted
      }
      if (n == 0) break;
      handle(std::span(request).first(static_cast<std::size_t>(n)), scratch);
    }
    --live_readers_;
    if (!stopping_) ::shutdown(relay_.get(), SHUT_RDWR);  // the peer sees the end of the connection
  }

  void handle(std::span<const std::byte> request, std::span<std::byte> scratch) {
    fuse_in_header header;
    if (request.size() < sizeof header) return;
    std::memcpy(&header, request.data(), sizeof header);
    if ((header.unique & (1ULL << 63)) != 0) ++resent_;  // FUSE_UNIQUE_RESEND
    switch (header.opcode) {
      case FUSE_READ:
        if (serve_read(header, request, scratch)) return;
        break;
      case FUSE_INTERRUPT:
        if (interrupt(request)) return;
        break;
      case FUSE_INIT:
        note_init(header, request);
        break;
      case FUSE_OPEN:
        note_open(header);
        break;
      default:
        break;
    }
    forward(header, request);
  }

  void forward(const fuse_in_header& header, std::span<const std::byte> request) {
    const bool answered = header.opcode != FUSE_FORGET && header.opcode != FUSE_BATCH_FORGET &&
                          header.opcode != FUSE_INTERRUPT && header.opcode != FUSE_INIT;
    if (journaling_ && answered) journal_->begin(header.unique, request);
    ++forwarded_;
    while (::send(relay_.get(), request.data(), request.size(), MSG_NOSIGNAL) < 0) {
      if (errno == EINTR) continue;
      // The peer has gone; a successor gets this request again, as it was never answered.
      return;
    }
  }

  bool serve_read(const fuse_in_header& header, std::span<const std::byte> request, std::span<std::byte> scratch);
  bool interrupt(std::span<const std::byte> request);

  void note_init(const fuse_in_header& header, std::span<const std::byte> request) {
    std::memcpy(&init_in_, request.data() + sizeof header, std::min(sizeof init_in_, request.size() - sizeof header));
    init_unique_ = header.unique;
    if (!options_.state_dir.empty()) store(join(options_.state_dir, "init"), request);
    choose_journal();
  }

  std::uint64_t offered() const {
    std::uint64_t flags = init_in_.flags;
    if ((flags & fuse_abi::kInitExt) != 0) flags |= std::uint64_t{init_in_.flags2} << 32;
    return flags;
  }

  void choose_journal() {
    const bool can_resend = (offered() & fuse_abi::kHasResend) != 0;
    journaling_ = journal_ != nullptr && (!can_resend || options_.force_journal);
    set_info("resend", can_resend ? "kernel" : "journal (this kernel cannot resend)");
    if (options_.force_journal) set_info("resend", "journal (forced)");
    if (journal_ == nullptr) set_info("resend", "none (no state directory)");
  }

  void note_open(const fuse_in_header& header) {
    if (!passthrough_) return;
    const std::shared_ptr<ReadFile> opened = file(header.nodeid);
    if (!opened || opened->backing_fd() < 0) return;
    const std::lock_guard lock(backing_mutex_);
    opens_[header.unique] = header.nodeid;
  }

  // -- the control peer's replies --------------------------------------------------------------------------------

  void relay_loop() {
    std::vector<std::byte> reply((1U << 20) + kBufferSlack);
    for (;;) {
      const ssize_t n = ::recv(relay_.get(), reply.data(), reply.size(), 0);
      if (n < 0 && errno == EINTR) continue;
      if (n < static_cast<ssize_t>(sizeof(fuse_out_header))) return;
      std::span<std::byte> bytes = std::span(reply).first(static_cast<std::size_t>(n));
      fuse_out_header header;
      std::memcpy(&header, bytes.data(), sizeof header);
      if (header.unique != 0 && header.unique == init_unique_) {
        init_unique_ = 0;
        if (resumed_) continue;  // the kernel had its answer from our predecessor
        bytes = rewrite_init(bytes);
      } else {
        rewrite_open(header, bytes);
      }
      while (::write(device_.get(), bytes.data(), bytes.size()) < 0 && (errno == EINTR || errno == EAGAIN)) {
      }
      if (journaling_ && header.unique != 0) journal_->end(header.unique);
    }
  }

  std::span<std::byte> rewrite_init(std::span<std::byte> bytes) {
    fuse_abi::InitOut out{};
    if (bytes.size() < sizeof(fuse_out_header) + sizeof out) return bytes;  // an error, or a protocol before 7.23
    std::byte* const body = bytes.data() + sizeof(fuse_out_header);
    std::memcpy(&out, body, sizeof out);
    const std::uint64_t can = offered();
    std::uint64_t flags = out.flags | (std::uint64_t{out.flags2} << 32);
    flags |= can & (FUSE_ASYNC_READ | FUSE_PARALLEL_DIROPS | FUSE_MAX_PAGES | FUSE_DO_READDIRPLUS |
                    FUSE_READDIRPLUS_AUTO | fuse_abi::kInitExt | fuse_abi::kHasResend);
    const auto page = static_cast<std::uint32_t>(::sysconf(_SC_PAGESIZE));
    if ((can & FUSE_MAX_PAGES) != 0) {
      out.max_pages = static_cast<std::uint16_t>(std::min(options_.max_read_bytes / page, 65535U));
    }
    out.max_readahead = std::max(out.max_readahead, options_.read_ahead_bytes);
    out.max_write = std::min(out.max_write, options_.max_write_bytes);
    out.max_background = options_.max_background;
    out.congestion_threshold = static_cast<std::uint16_t>(options_.max_background * 3 / 4);
    if (!options_.passthrough) {
      set_info("passthrough", "off (not asked for)");
    } else if ((can & fuse_abi::kPassthrough) == 0 || (can & fuse_abi::kInitExt) == 0) {
      set_info("passthrough", "off (this kernel has none)");
    } else {
      flags |= fuse_abi::kPassthrough;
      out.max_stack_depth = 1;
      passthrough_ = true;
      set_info("passthrough", "on");
    }
    if ((flags >> 32) != 0) out.minor = std::max(out.minor, std::min(init_in_.minor, fuse_abi::kPassthroughMinor));
    out.flags = static_cast<std::uint32_t>(flags);
    out.flags2 = static_cast<std::uint32_t>(flags >> 32);
    std::memcpy(body, &out, sizeof out);
    set_info("protocol", std::to_string(out.major) + "." + std::to_string(out.minor));
    set_info("max_write_bytes", std::to_string(out.max_write));
    set_info("max_pages", std::to_string(out.max_pages));
    set_info("max_read_bytes", std::to_string(std::uint64_t{out.max_pages} * page));
    if (!options_.state_dir.empty()) {
      const char passthrough = passthrough_ ? '1' : '0';
      store(join(options_.state_dir, "passthrough"), std::as_bytes(std::span(&passthrough, 1)));
    }
    tune_thread_ = std::jthread([self = shared_from_this()] { self->tune(); });
    return bytes;
  }

  // Raises what only sysfs can raise, once the kernel has taken the INIT reply.
  void tune() {
    const MountEntry mount = find_mount(options_.mountpoint);
    if (!mount.found) return;
    const auto wanted = options_.read_ahead_bytes / 1024;
    for (int attempt = 0; attempt < 50; ++attempt) {
      const bool raised = write_line(bdi_path(mount), std::to_string(wanted));
      if (raised && std::atoll(read_line(bdi_path(mount)).c_str()) == static_cast<long long>(wanted)) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

  void rewrite_open(const fuse_out_header& header, std::span<std::byte> bytes) {
    if (!passthrough_) return;
    const std::lock_guard lock(backing_mutex_);
    const auto open = opens_.find(header.unique);
    if (open == opens_.end()) return;
    const std::uint64_t inode = open->second;
    opens_.erase(open);
    fuse_abi::OpenOut out;
    if (header.error != 0 || bytes.size() < sizeof header + sizeof out) return;
    const std::int32_t id = backing_id(inode);
    if (id <= 0) {
      ++passthrough_failures_;
      return;
    }
    std::memcpy(&out, bytes.data() + sizeof header, sizeof out);
    out.open_flags = (out.open_flags & ~static_cast<std::uint32_t>(FOPEN_KEEP_CACHE | FOPEN_DIRECT_IO)) |
                     fuse_abi::kOpenPassthrough;
    out.backing_id = id;
    std::memcpy(bytes.data() + sizeof header, &out, sizeof out);
    ++passthrough_opens_;
  }

  // One id an inode: the kernel refuses a second backing file for an inode that is open.
  std::int32_t backing_id(std::uint64_t inode) {
    if (const auto known = backings_.find(inode); known != backings_.end()) return known->second;
    const std::shared_ptr<ReadFile> opened = file(inode);
    if (!opened) return -1;
    fuse_abi::BackingMap map{opened->backing_fd(), 0, 0};
    const int id = ::ioctl(device_.get(), fuse_abi::kBackingOpen, &map);
    if (id <= 0) {
      set_info("passthrough_error", std::strerror(errno));
      return -1;
    }
    backings_[inode] = id;
    store_backings();
    return id;
  }

  void store_backings() {
    if (options_.state_dir.empty()) return;
    std::vector<std::uint64_t> pairs;
    for (const auto& [inode, id] : backings_) {
      pairs.push_back(inode);
      pairs.push_back(static_cast<std::uint64_t>(id));
    }
    store(join(options_.state_dir, "backings"), std::as_bytes(std::span(pairs)));
  }

 public:
  void load_state() {
    resumed_ = true;
    std::ifstream init(join(options_.state_dir, "init"), std::ios::binary);
    std::string bytes((std::istreambuf_iterator<char>(init)), {});
    if (bytes.size() < sizeof(fuse_in_header) || bytes.size() > 4096) {
      throw Error(Errc::not_found, options_.state_dir + " holds no session that could be resumed");
    }
    init_request_.assign(reinterpret_cast<const std::byte*>(bytes.data()),
                         reinterpret_cast<const std::byte*>(bytes.data() + bytes.size()));
    passthrough_ = read_line(join(options_.state_dir, "passthrough")) == "1";
    set_info("passthrough", passthrough_ ? "on" : "off (as the predecessor left it)");
    std::ifstream pairs(join(options_.state_dir, "backings"), std::ios::binary);
    std::uint64_t pair[2];
    while (pairs.read(reinterpret_cast<char*>(pair), sizeof pair)) backings_[pair[0]] = static_cast<int>(pair[1]);
  }

 private:
  void replay_init() {
    fuse_in_header header;
    std::memcpy(&header, init_request_.data(), sizeof header);
    std::memcpy(&init_in_, init_request_.data() + sizeof header,
                std::min(sizeof init_in_, init_request_.size() - sizeof header));
    choose_journal();
    init_unique_ = header.unique;
    forward(header, init_request_);
  }

  void resend() {
    if (journaling_) {
      std::vector<std::byte> scratch(options_.max_read_bytes);
      for (const std::vector<std::byte>& request : journal_->take_all()) {
        ++resent_;
        handle(request, scratch);
      }
      return;
    }
    fuse_out_header notify{sizeof notify, fuse_abi::kNotifyResend, 0};
    while (::write(device_.get(), &notify, sizeof notify) < 0 && errno == EINTR) {
    }
  }

  std::size_t request_bytes_ = 0;
  std::unique_ptr<RequestJournal> journal_;
  std::atomic<bool> journaling_ = false;
  std::vector<std::byte> init_request_;
  fuse_init_in init_in_{};
  std::atomic<std::uint64_t> init_unique_ = 0;

  std::atomic<bool> stopping_ = false;
  std::atomic<int> live_readers_ = 0;
  std::vector<std::thread> readers_;
  std::thread relay_thread_;
  std::jthread tune_thread_;

  mutable std::shared_mutex files_mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<ReadFile>> files_;

  std::mutex backing_mutex_;
  std::unordered_map<std::uint64_t, std::uint64_t> opens_;  // unique of an OPEN on its way → inode
  std::map<std::uint64_t, std::int32_t> backings_;          // inode → backing id
  std::atomic<bool> passthrough_ = false;

  std::shared_mutex device_mutex_;  // shared: a late answer is being written
  bool closed_ = false;
  std::mutex parked_mutex_;
  std::unordered_map<std::uint64_t, std::uint32_t> parked_;  // unique → pid

  mutable std::mutex info_mutex_;
  std::map<std::string, std::string> info_;

  std::atomic<std::uint64_t> reads_ = 0, parked_reads_ = 0, read_bytes_ = 0, read_errors_ = 0, interrupted_ = 0,
                             forwarded_ = 0, passthrough_opens_ = 0, passthrough_failures_ = 0, resent_ = 0;
};

// The answer to a read whose bytes are not here yet.
class Session::State::Parked final : public ReadReply {
 public:
  Parked(std::shared_ptr<State> state, std::uint64_t unique) : state_(std::move(state)), unique_(unique) {}
  ~Parked() override {
    if (!answered_) error(EIO);  // dropped without an answer: that must never leave a reader waiting
  }
  void data(std::span<const iovec> parts) noexcept override {
    answered_ = true;
    if (state_->unpark(unique_)) state_->answer_late(unique_, 0, parts);
  }
  void error(int errno_value) noexcept override {
    answered_ = true;
    if (state_->unpark(unique_)) state_->answer_late(unique_, errno_value, {});
  }

 private:
  std::shared_ptr<State> state_;
  std::uint64_t unique_;
  bool answered_ = false;
};

bool Session::State::serve_read(const fuse_in_header& header, std::span<const std::byte> request,
                                std::span<std::byte> scratch) {
  const std::shared_ptr<ReadFile> target = file(header.nodeid);
  fuse_read_in in;
  if (!target || request.size() < sizeof header + sizeof in) return false;
  std::memcpy(&in, request.data() + sizeof header, sizeof in);
  const std::size_t length = cap_read(in.size);
  ++reads_;
  if (journaling_) journal_->begin(header.unique, request);
  const ReadContext context{header.pid};
  iovec view{};
  ssize_t n = target->try_read(in.offset, length, context, scratch, view);
  if (n >= 0) {
    read_bytes_ += static_cast<std::uint64_t>(n);
    if (answer(header.unique, 0, n > 0 ? std::span<const iovec>(&view, 1) : std::span<const iovec>{})) return true;
    n = -EAGAIN;  // a mapped page could not be read: take the careful way
  }
  if (n != -EAGAIN) {
    ++read_errors_;
    answer(header.unique, static_cast<int>(-n), {});
    return true;
  }
  ++parked_reads_;
  {
    const std::lock_guard lock(parked_mutex_);
    parked_[header.unique] = header.pid;
  }
  target->read(in.offset, length, context, std::make_unique<Parked>(shared_from_this(), header.unique));
  return true;
}

bool Session::State::interrupt(std::span<const std::byte> request) {
  fuse_interrupt_in in;
  if (request.size() < sizeof(fuse_in_header) + sizeof in) return true;
  std::memcpy(&in, request.data() + sizeof(fuse_in_header), sizeof in);
  std::uint32_t pid = 0;
  {
    const std::lock_guard lock(parked_mutex_);
    const auto parked = parked_.find(in.unique);
    if (parked == parked_.end()) return false;  // the control peer's, or answered meanwhile
    pid = parked->second;
  }
  // Regular files are not interrupted by signals that do not kill; the reader would see EINTR where no disk gives it.
  if (!is_dying(pid)) return true;
  if (unpark(in.unique)) {
    ++interrupted_;
    answer(in.unique, EINTR, {});
  }
  return true;
}

Session::Session(std::shared_ptr<State> state) : state_(std::move(state)) {}

Session::~Session() { stop(); }

std::shared_ptr<Session> Session::attach(UniqueFd device, const SessionOptions& options) {
  return std::shared_ptr<Session>(new Session(std::make_shared<State>(std::move(device), options)));
}

std::shared_ptr<Session> Session::mount(const SessionOptions& options) {
  UniqueFd device(::open("/dev/fuse", O_RDWR | O_CLOEXEC));
  if (!device) throw_errno("/dev/fuse");
  struct stat status {};
  if (::stat(options.mountpoint.c_str(), &status) != 0) throw_errno(options.mountpoint);
  char data[256];
  std::snprintf(data, sizeof data, "fd=%d,rootmode=%o,user_id=%u,group_id=%u,default_permissions%s,max_read=%u",
                device.get(), status.st_mode & S_IFMT, ::getuid(), ::getgid(),
                options.allow_other ? ",allow_other" : "", options.max_read_bytes);
  const unsigned long flags = MS_NOSUID | MS_NODEV | (options.read_only ? MS_RDONLY : 0UL);
  std::shared_ptr<Session> session = attach(std::move(device), options);
  if (::mount(options.fsname.c_str(), options.mountpoint.c_str(), ("fuse." + options.subtype).c_str(), flags, data) != 0) {
    throw_errno("mount " + options.mountpoint);
  }
  return session;
}

std::shared_ptr<Session> Session::resume(UniqueFd device, const SessionOptions& options) {
  if (options.state_dir.empty()) throw Error(Errc::usage, "a session without state directory cannot be resumed");
  std::shared_ptr<Session> session = attach(std::move(device), options);
  session->state_->load_state();
  return session;
}

int Session::control_fd() const noexcept { return state_->control_.get(); }
int Session::device_fd() const noexcept { return state_->device_.get(); }
void Session::add_file(std::uint64_t inode, std::shared_ptr<ReadFile> file) { state_->add_file(inode, std::move(file)); }
void Session::remove_file(std::uint64_t inode) { state_->remove_file(inode); }
void Session::start() { state_->start(); }
void Session::stop() noexcept { state_->stop(); }

void Session::unmount(bool lazy) {
  if (::umount2(state_->options_.mountpoint.c_str(), UMOUNT_NOFOLLOW | (lazy ? MNT_DETACH : 0)) != 0) {
    throw_errno("umount " + state_->options_.mountpoint);
  }
}

SessionStatistics Session::statistics() const noexcept { return state_->statistics(); }
std::map<std::string, std::string> Session::info() const { return state_->info(); }

}  // namespace bootseer
