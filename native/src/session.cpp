#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bootseer/error.hpp>
#include <bootseer/session.hpp>
#include <bootseer/session_control.hpp>
#include <bootseer/session_device.hpp>
#include <bootseer/session_mount.hpp>
#include <bootseer/session_seats.hpp>
#include <bootseer/session_state.hpp>
#include <bootseer/session_wire.hpp>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <unordered_map>
#include <vector>

namespace bootseer {
namespace {

using fuse::Request;
using std::memory_order_relaxed;

// Room for any request: the kernel refuses to hand out even a small one when the largest WRITE would not fit.
constexpr std::size_t kRequestBytes = (1U << 20) + 8192;
// Above any reply of the control peer: a piece of a READ, a directory, an extended attribute.
constexpr std::size_t kControlReplyBytes = (1U << 20) + 65536;
// The largest READ: the kernel's limit of 256 pages, and ours.
constexpr std::size_t kScratchBytes = 1U << 20;
// A READ that is answered without letting another thread wait for the next request meanwhile.
constexpr std::uint32_t kSmallReadBytes = 32U << 10;
constexpr int kInterruptPollMs = 50;
constexpr int kNice = -5;

// Interrupts the read(2) that a reader thread is blocked in. Its handler does nothing.
int wake_signal() {
  return SIGRTMAX - 2;
}

void install_wake_handler() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action {};
    action.sa_handler = [](int) {};
    if (::sigaction(wake_signal(), &action, nullptr) != 0) throw_errno("cannot install a signal handler");
  });
}

bool kernel_at_least(unsigned wanted_major, unsigned wanted_minor) {
  utsname name{};
  unsigned major = 0;
  unsigned minor = 0;
  if (::uname(&name) != 0 || std::sscanf(name.release, "%u.%u", &major, &minor) != 2) return false;
  return major > wanted_major || (major == wanted_major && minor >= wanted_minor);
}

// That we may run on, which is less than the machine has in a container.
unsigned processors() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return static_cast<unsigned>(CPU_COUNT(&set));
}

UniqueFd make_event() {
  UniqueFd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd) throw_errno("cannot create an eventfd");
  return fd;
}

void post(const UniqueFd& event) noexcept {
  const std::uint64_t one = 1;
  // Fails only when the counter is full, and then the event is posted already.
  [[maybe_unused]] const ssize_t put = ::write(event.get(), &one, sizeof(one));
}

std::span<const std::byte> bytes_of(const auto& value) {
  return std::as_bytes(std::span(&value, 1));
}

// One per reader thread. Counters are written by that thread only; own cache lines keep readers apart.
struct alignas(64) Reader {
  std::unique_ptr<std::byte[]> request{new std::byte[kRequestBytes]};
  std::unique_ptr<std::byte[]> scratch{new std::byte[kScratchBytes]};
  int slot = Journal::kNoSlot;
  bool seated = false;
  std::atomic<std::uint64_t> reads{0};
  std::atomic<std::uint64_t> waited{0};
  std::atomic<std::uint64_t> bytes{0};
  std::atomic<bool> exited{false};
  std::thread thread;
};

void bump(std::atomic<std::uint64_t>& counter, std::uint64_t by = 1) {
  counter.store(counter.load(memory_order_relaxed) + by, memory_order_relaxed);
}

}  // namespace

class Session::Core {
 public:
  Core(UniqueFd device, SessionOptions options, bool resumed);
  ~Core() { stop(); }
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  void start();
  void stop();
  Info info() const;
  std::map<std::string, std::uint64_t> statistics() const;

  SessionOptions options_;
  const bool resumed_;
  std::shared_ptr<Device> device_;
  ControlChannel control_;
  UniqueFd ended_event_ = make_event();
  std::atomic<bool> ended_{false};

  void add_file(std::uint64_t nodeid, std::shared_ptr<ReadFile> file);
  void remove_file(std::uint64_t nodeid);

 private:
  std::string state_path(const char* name) const {
    return options_.state_dir.empty() ? std::string() : options_.state_dir + "/" + name;
  }
  std::shared_ptr<Journal> open_journal() const;
  std::shared_ptr<ReadFile> find(std::uint64_t nodeid) const;

  // Reader threads.
  void raise_priority();
  void read_requests(Reader& reader);
  void leave_seat(Reader& reader);
  std::span<std::byte> receive(Reader& reader, ssize_t& result);
  void handle(Reader& reader, std::span<std::byte> message, bool replayed);
  void serve(Reader& reader, const Request& request, const std::shared_ptr<ReadFile>& file);
  void forward(Reader& reader, const Request& request, std::span<const std::byte> message);
  void on_init_request(Reader& reader, const Request& request, std::span<const std::byte> message);
  void on_interrupt(const Request& request, std::span<const std::byte> message);
  void on_release(std::uint64_t nodeid);
  void end() noexcept;

  // Relay thread.
  void relay();
  void on_reply(std::span<std::byte> message);
  void on_init_reply(std::span<const std::byte> message);
  void on_open_reply(std::uint64_t nodeid, std::span<std::byte> message);
  bool ask_next_piece(std::uint64_t unique, Pending& pending, std::span<const std::byte> reply);
  OpenTable::Mode choose_mode(std::uint64_t nodeid);
  void close_backing(std::int32_t id) noexcept;
  void tune();

  void send_control(std::span<const std::byte> message);
  void replay();

  mutable std::shared_mutex files_mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<ReadFile>> files_;
  OpenTable opens_;

  mutable std::mutex info_mutex_;
  std::vector<std::byte> init_request_;
  std::vector<std::byte> init_reply_;  // as the kernel got it
  fuse::Negotiated negotiated_;
  std::map<std::string, Value> tuned_;
  std::map<std::string, std::string> fallbacks_;  // those that do not come from INIT
  std::string last_error_;
  std::atomic<bool> initialized_{false};
  std::atomic<bool> init_known_{false};  // recorded, or seen
  std::atomic<bool> passthrough_{false};
  std::atomic<std::uint64_t> replayed_init_{0};  // unique of an INIT whose reply is to be dropped

  std::vector<std::unique_ptr<Reader>> readers_;
  Seats seats_;
  std::thread relay_thread_;
  UniqueFd wake_ = make_event();
  std::atomic<bool> stopping_{false};
  std::atomic<bool> started_{false};

  std::atomic<std::uint64_t> forwarded_{0};
  std::atomic<std::uint64_t> relayed_{0};
  std::atomic<std::uint64_t> malformed_{0};
  std::atomic<std::uint64_t> passthrough_opens_{0};
  std::atomic<std::uint64_t> passthrough_fallbacks_{0};
  std::atomic<std::uint64_t> journal_overflows_{0};
  std::atomic<std::uint64_t> replayed_requests_{0};
};

Session::Core::Core(UniqueFd device, SessionOptions options, bool resumed)
    : options_(std::move(options)),
      resumed_(resumed),
      device_(std::make_shared<Device>(std::move(device), open_journal())),
      opens_(state_path("opens")),
      // The programs that read need the other half.
      seats_(std::clamp(processors() / 2, 1U, options_.threads), options_.threads) {
  install_wake_handler();
  for (unsigned index = 0; index < options_.threads; ++index) readers_.push_back(std::make_unique<Reader>());
  init_known_ = !resumed_;
  if (!resumed_) return;
  // Without a record the predecessor died before INIT was answered, and the kernel will ask again.
  if (auto record = InitRecord::load(state_path("init"))) {
    negotiated_ = fuse::describe_init(record->request, record->reply);
    if (negotiated_.fallbacks.contains("init")) throw Error(Errc::integrity, negotiated_.fallbacks["init"]);
    passthrough_ = negotiated_.passthrough;
    init_request_ = std::move(record->request);
    init_reply_ = std::move(record->reply);
    initialized_ = init_known_ = true;
  }
}

std::shared_ptr<Journal> Session::Core::open_journal() const {
  const bool needed = options_.journal == JournalMode::always ||
                      (options_.journal == JournalMode::automatic && !kernel_at_least(6, 9));
  if (!needed || options_.state_dir.empty()) return nullptr;
  return std::make_shared<Journal>(state_path("journal"));
}

void Session::Core::add_file(std::uint64_t nodeid, std::shared_ptr<ReadFile> file) {
  const std::unique_lock lock(files_mutex_);
  files_.insert_or_assign(nodeid, std::move(file));
}

void Session::Core::remove_file(std::uint64_t nodeid) {
  std::shared_ptr<ReadFile> file;  // destroyed after the lock is gone
  const std::unique_lock lock(files_mutex_);
  const auto found = files_.find(nodeid);
  if (found == files_.end()) return;
  file = std::move(found->second);
  files_.erase(found);
}

std::shared_ptr<ReadFile> Session::Core::find(std::uint64_t nodeid) const {
  const std::shared_lock lock(files_mutex_);
  const auto found = files_.find(nodeid);
  return found == files_.end() ? nullptr : found->second;
}

void Session::Core::start() {
  if (started_.exchange(true)) throw Error(Errc::usage, "the session was started before");
  if (resumed_) replay();
  // Signals that Python handles belong to its main thread.
  sigset_t all;
  sigset_t previous;
  sigfillset(&all);
  sigdelset(&all, wake_signal());
  ::pthread_sigmask(SIG_BLOCK, &all, &previous);
  for (std::size_t index = 0; index < readers_.size(); ++index) {
    Reader& reader = *readers_[index];
    reader.thread = std::thread([this, &reader] {
      raise_priority();
      read_requests(reader);
      reader.exited = true;
    });
    ::pthread_setname_np(reader.thread.native_handle(), ("bsr-read-" + std::to_string(index)).c_str());
  }
  relay_thread_ = std::thread([this] {
    raise_priority();
    relay();
  });
  ::pthread_setname_np(relay_thread_.native_handle(), "bsr-relay");
  ::pthread_sigmask(SIG_SETMASK, &previous, nullptr);
}

// Of the calling thread: a read that a job waits for should not queue behind whatever computes meanwhile, be
// it the interpreter of this very process. Our threads use little of what they are given.
void Session::Core::raise_priority() {
  if (::setpriority(PRIO_PROCESS, 0, kNice) == 0) return;
  const std::lock_guard lock(info_mutex_);
  fallbacks_["priority"] = "cannot raise the priority of the reader threads (needs CAP_SYS_NICE)";
}

void Session::Core::stop() {
  stopping_ = true;
  seats_.shut();
  control_.shut();
  post(wake_);
  for (auto& reader : readers_) {
    if (!reader->thread.joinable()) continue;
    // Again and again: the signal may arrive just before the thread enters read(2).
    while (!reader->exited) {
      ::pthread_kill(reader->thread.native_handle(), wake_signal());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    reader->thread.join();
  }
  if (relay_thread_.joinable()) relay_thread_.join();
}

// Brings the new control peer to the state the old one was in, then has the unanswered requests served again.
// Before any reader thread runs: a request that one of them had in hand would be sent twice.
void Session::Core::replay() {
  if (initialized_) {
    const auto request = fuse::parse_request(init_request_);
    replayed_init_ = request->header.unique;
    send_control(init_request_);
  }
  if (device_->journal() == nullptr || options_.journal == JournalMode::automatic) {
    const fuse::OutHeader resend{sizeof(fuse::OutHeader), fuse::kNotifyResend, 0};
    const int failure = device_->write_message(bytes_of(resend));
    if (failure == 0) return;
    const std::lock_guard lock(info_mutex_);
    last_error_ = "the kernel refused to resend requests: " + std::generic_category().message(failure);
  }
  if (device_->journal() == nullptr) return;
  Reader& reader = *readers_.front();
  for (const auto& entry : device_->journal()->pending()) {
    auto message = device_->journal()->slot(entry.slot);
    reader.slot = entry.slot;
    replayed_requests_.fetch_add(1, memory_order_relaxed);
    if (entry.bytes <= message.size()) {
      handle(reader, message.first(entry.bytes), true);
    } else if (const auto header = fuse::body_as<fuse::InHeader>(message)) {
      device_->answer(header->unique, EIO, {});
    }
    // Still ours: answered at once.
    device_->journal()->release(std::exchange(reader.slot, Journal::kNoSlot));
  }
}

void Session::Core::leave_seat(Reader& reader) {
  if (std::exchange(reader.seated, false)) seats_.give();
}

void Session::Core::end() noexcept {
  seats_.shut();
  if (!ended_.exchange(true)) post(ended_event_);
}

// Reads one request. With a journal the kernel writes its head straight into a slot.
std::span<std::byte> Session::Core::receive(Reader& reader, ssize_t& result) {
  auto* const buffer = reader.request.get();
  Journal* const journal = device_->journal();
  if (journal != nullptr && reader.slot == Journal::kNoSlot) {
    reader.slot = journal->acquire();
    if (reader.slot == Journal::kNoSlot) journal_overflows_.fetch_add(1, memory_order_relaxed);
  }
  if (journal == nullptr || reader.slot == Journal::kNoSlot) {
    result = ::read(device_->fd(), buffer, kRequestBytes);
    return result <= 0 ? std::span<std::byte>() : std::span(buffer, static_cast<std::size_t>(result));
  }
  const auto slot = journal->slot(reader.slot);
  const std::array<iovec, 2> parts = {iovec{slot.data(), slot.size()},
                                      iovec{buffer + slot.size(), kRequestBytes - slot.size()}};
  result = ::readv(device_->fd(), parts.data(), static_cast<int>(parts.size()));
  if (result <= 0) return {};
  const auto got = static_cast<std::size_t>(result);
  if (got <= slot.size()) return slot.first(got);
  std::copy(slot.begin(), slot.end(), buffer);
  return {buffer, got};
}

void Session::Core::read_requests(Reader& reader) {
  while (!stopping_.load(std::memory_order_acquire)) {
    if (!reader.seated && !seats_.take()) return;
    reader.seated = true;
    ssize_t result = 0;
    const auto message = receive(reader, result);
    if (result > 0) {
      handle(reader, message, false);
      if (reader.slot != Journal::kNoSlot) device_->journal()->clear(reader.slot);
      continue;
    }
    if (result == 0) return end();
    switch (errno) {
      case EINTR:
      case ENOENT:  // the request was taken back while it was being read
        continue;
      case EAGAIN: {
        pollfd poll_fd{device_->fd(), POLLIN, 0};
        ::poll(&poll_fd, 1, 100);
        continue;
      }
      default:  // ENODEV: unmounted; ECONNABORTED: aborted
        return end();
    }
  }
}

void Session::Core::handle(Reader& reader, std::span<std::byte> message, bool replayed) {
  const auto request = fuse::parse_request(message);
  if (!request) {
    malformed_.fetch_add(1, memory_order_relaxed);
    return;
  }
  const auto& header = request->header;
  try {
    if (header.opcode == fuse::kRead) {
      if (const auto file = find(header.nodeid)) return serve(reader, *request, file);
    }
    leave_seat(reader);
    switch (header.opcode) {
      case fuse::kInterrupt:
        return on_interrupt(*request, message);
      case fuse::kInit:
        return on_init_request(reader, *request, message);
      case fuse::kOpen: {
        const auto open = fuse::body_as<fuse::OpenIn>(request->body);
        const bool writes = open && (open->flags & O_ACCMODE) != O_RDONLY;
        if (writes && (find(header.nodeid) || opens_.is_passthrough(header.nodeid))) {
          device_->answer(header.unique, EROFS, {});
          return;
        }
        break;
      }
      case fuse::kRelease:
        // One that is sent again may have been counted before.
        if (!replayed && (header.unique & fuse::kUniqueResend) == 0) on_release(header.nodeid);
        break;
      default:
        break;
    }
    if (!init_known_) {
      // The kernel sends nothing but INIT to a mount that was never initialized: the record is lost.
      {
        const std::lock_guard lock(info_mutex_);
        last_error_ = "the state directory holds no record of this mount's INIT";
      }
      if (fuse::expects_reply(header.opcode)) device_->answer(header.unique, EIO, {});
      return;
    }
    forward(reader, *request, message);
  } catch (const std::bad_alloc&) {
    if (fuse::expects_reply(header.opcode)) {
      if (const auto pending = device_->take(header.unique)) device_->done(*pending);
      device_->answer(header.unique, ENOMEM, {});
    }
  }
}

void Session::Core::serve(Reader& reader, const Request& request, const std::shared_ptr<ReadFile>& file) {
  const auto& header = request.header;
  bump(reader.reads);
  const auto read = fuse::body_as<fuse::ReadIn>(request.body);
  if (!read || read->size > kScratchBytes) {
    device_->answer(header.unique, EINVAL, {});
    return;
  }
  if (read->size > kSmallReadBytes) leave_seat(reader);
  const auto began = reader.seated ? Seats::Clock::now() : Seats::Clock::time_point();
  const ReadContext context{header.pid};
  iovec view{};
  const ssize_t got =
      file->try_read(read->offset, read->size, context, {reader.scratch.get(), kScratchBytes}, view);
  if (got >= 0) {
    view.iov_len = static_cast<std::size_t>(got);
    bump(reader.bytes, view.iov_len);
    device_->answer(header.unique, 0, {&view, got > 0 ? 1U : 0U});
    if (reader.seated && !seats_.note(began, Seats::Clock::now())) leave_seat(reader);
  } else if (got == -EAGAIN) {
    bump(reader.waited);
    leave_seat(reader);
    // From here on the slot belongs to the answer.
    auto reply = device_->park(header.unique, header.nodeid, header.pid, reader.slot);
    reader.slot = Journal::kNoSlot;
    file->read(read->offset, read->size, context, std::move(reply));
  } else {
    device_->counters().read_errors.fetch_add(1, memory_order_relaxed);
    device_->answer(header.unique, static_cast<int>(-got), {});
  }
}

void Session::Core::send_control(std::span<const std::byte> message) {
  if (control_.send(message) == ControlChannel::Sent::queued) post(wake_);
}

void Session::Core::forward(Reader& reader, const Request& request, std::span<const std::byte> message) {
  const auto& header = request.header;
  forwarded_.fetch_add(1, memory_order_relaxed);
  if (!fuse::expects_reply(header.opcode)) {
    send_control(message);
    return;
  }
  Pending pending;
  pending.opcode = header.opcode;
  pending.pid = header.pid;
  pending.nodeid = header.nodeid;
  pending.slot = reader.slot;
  std::vector<std::byte> first_piece;
  if (header.opcode == fuse::kRead) {
    const std::size_t piece = control_.max_message_bytes() - 4096;
    auto read = fuse::body_as<fuse::ReadIn>(request.body);
    if (read && read->size > piece) {
      pending.split = std::make_shared<SplitRead>();
      pending.split->request.assign(message.begin(), message.end());
      first_piece = pending.split->request;
      read->size = static_cast<std::uint32_t>(piece);
      std::memcpy(first_piece.data() + sizeof(header), &*read, sizeof(*read));
      message = first_piece;
    }
  }
  const bool interrupted = device_->add(header.unique, std::move(pending));
  reader.slot = Journal::kNoSlot;
  const auto unique = header.unique;
  const auto sent = control_.send(message);
  // The message may be gone now: its journal slot is free again once the peer has answered.
  if (sent == ControlChannel::Sent::queued) post(wake_);
  if (sent == ControlChannel::Sent::too_large) {
    if (const auto taken = device_->take(unique)) {
      device_->answer(unique, EIO, {});
      device_->done(*taken);
    }
  } else if (interrupted) {
    struct {
      fuse::InHeader header;
      fuse::InterruptIn body;
    } interrupt{};
    interrupt.header.len = sizeof(interrupt);
    interrupt.header.opcode = fuse::kInterrupt;
    interrupt.header.unique = unique | 1;
    interrupt.body.unique = unique;
    send_control(bytes_of(interrupt));
  }
}

void Session::Core::on_init_request(Reader& reader, const Request& request,
                                    std::span<const std::byte> message) {
  if (initialized_) {
    // The predecessor recorded the exchange but died before the kernel had the reply.
    std::vector<std::byte> reply;
    {
      const std::lock_guard lock(info_mutex_);
      reply = init_reply_;
    }
    auto out = *fuse::body_as<fuse::OutHeader>(reply);
    out.unique = request.header.unique;
    std::memcpy(reply.data(), &out, sizeof(out));
    device_->write_message(reply);
    tune();
    return;
  }
  {
    const std::lock_guard lock(info_mutex_);
    init_request_.assign(message.begin(), message.end());
  }
  init_known_ = true;
  forward(reader, request, message);
}

void Session::Core::on_interrupt(const Request& request, std::span<const std::byte> message) {
  const auto interrupt = fuse::body_as<fuse::InterruptIn>(request.body);
  if (!interrupt) return;
  if (device_->interrupt(interrupt->unique)) {
    send_control(message);
  } else if (device_->parked() > 0) {
    post(wake_);  // the relay thread looks after interrupted reads
  }
}

void Session::Core::on_release(std::uint64_t nodeid) {
  if (const auto id = opens_.close(nodeid)) close_backing(*id);
}

void Session::Core::close_backing(std::int32_t id) noexcept {
  auto number = static_cast<std::uint32_t>(id);
  ::ioctl(device_->fd(), fuse::kIocBackingClose, &number);
}

void Session::Core::relay() {
  std::vector<std::byte> buffer(kControlReplyBytes);
  bool peer_open = true;
  std::size_t interrupted = 0;
  while (!stopping_) {
    std::array<pollfd, 2> fds{};
    fds[0] = {wake_.get(), POLLIN, 0};
    fds[1] = {control_.fd(), static_cast<short>(POLLIN | (control_.has_backlog() ? POLLOUT : 0)), 0};
    const int ready = ::poll(fds.data(), peer_open ? 2 : 1, interrupted > 0 ? kInterruptPollMs : -1);
    std::uint64_t ignored = 0;
    if ((fds[0].revents & POLLIN) != 0) {
      [[maybe_unused]] const ssize_t drained = ::read(wake_.get(), &ignored, sizeof(ignored));
    }
    if (ready == 0 || fds[0].revents != 0) interrupted = device_->reap_interrupted();
    if (!peer_open || ready <= 0) continue;
    if ((fds[1].revents & POLLOUT) != 0) control_.flush();
    if ((fds[1].revents & (POLLIN | POLLHUP | POLLERR)) == 0) continue;
    const ssize_t got = ::recv(control_.fd(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got > 0) {
      on_reply(std::span(buffer).first(static_cast<std::size_t>(got)));
    } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
      control_.mark_lost();
      peer_open = false;
    }
  }
}

void Session::Core::on_reply(std::span<std::byte> message) {
  const auto header = fuse::body_as<fuse::OutHeader>(message);
  if (!header || header->len != message.size()) {
    malformed_.fetch_add(1, memory_order_relaxed);
    return;
  }
  relayed_.fetch_add(1, memory_order_relaxed);
  if (header->unique != 0 && header->unique == replayed_init_.load()) {
    replayed_init_ = 0;
    if (header->error != 0) {
      const std::lock_guard lock(info_mutex_);
      last_error_ = "the control peer refused the replayed INIT";
    }
    return;
  }
  auto pending = header->unique == 0 ? std::nullopt : device_->take(header->unique);
  if (!pending) {
    // A notification, or the answer to an INTERRUPT.
    device_->write_message(message);
    return;
  }
  switch (pending->opcode) {
    case fuse::kInit:
      on_init_reply(message);
      break;
    case fuse::kOpen:
      on_open_reply(pending->nodeid, message);
      break;
    case fuse::kCreate:
    case fuse::kTmpfile: {
      const auto nodeid = fuse::body_as<std::uint64_t>(message.subspan(sizeof(fuse::OutHeader)));
      if (header->error == 0 && nodeid) opens_.open(*nodeid, [] { return OpenTable::Mode{}; });
      device_->write_message(message);
      break;
    }
    case fuse::kRead:
      if (pending->split && ask_next_piece(header->unique, *pending, message)) return;
      if (pending->split && header->error == 0) {
        const iovec part{pending->split->collected.data(), pending->split->collected.size()};
        device_->answer(header->unique, 0, {&part, 1});
      } else {
        device_->write_message(message);
      }
      break;
    default:
      device_->write_message(message);
  }
  device_->done(*pending);
}

// Collects one piece of a large READ; true when another one was asked for.
bool Session::Core::ask_next_piece(std::uint64_t unique, Pending& pending, std::span<const std::byte> reply) {
  if (fuse::body_as<fuse::OutHeader>(reply)->error != 0) return false;
  auto& split = *pending.split;
  const auto data = reply.subspan(sizeof(fuse::OutHeader));
  split.collected.insert(split.collected.end(), data.begin(), data.end());
  const auto whole = *fuse::body_as<fuse::ReadIn>(std::span(split.request).subspan(sizeof(fuse::InHeader)));
  const std::size_t piece = control_.max_message_bytes() - 4096;
  if (split.collected.size() >= whole.size || data.size() < piece) return false;
  auto next = whole;
  next.offset += split.collected.size();
  next.size = static_cast<std::uint32_t>(std::min<std::size_t>(piece, whole.size - split.collected.size()));
  auto message = split.request;
  std::memcpy(message.data() + sizeof(fuse::InHeader), &next, sizeof(next));
  device_->add(unique, std::move(pending));
  send_control(message);
  return true;
}

void Session::Core::on_init_reply(std::span<const std::byte> message) {
  fuse::InitWishes wishes;
  wishes.max_read_bytes = options_.max_read_bytes;
  wishes.max_write_bytes =
      static_cast<std::uint32_t>((control_.max_message_bytes() - 4096) & ~std::size_t{4095});
  wishes.max_readahead_bytes = options_.read_ahead_bytes;
  wishes.max_background = options_.max_background;
  wishes.passthrough = options_.passthrough;
  std::vector<std::byte> request;
  {
    const std::lock_guard lock(info_mutex_);
    request = init_request_;
  }
  fuse::Negotiated negotiated;
  const auto reply = fuse::rewrite_init_reply(request, message, wishes, negotiated);
  const bool understood = !negotiated.fallbacks.contains("init");
  // Recorded before the kernel has it: an initialized mount without a record could not be resumed, while a
  // record whose reply never arrived is sent again.
  if (understood && !options_.state_dir.empty()) {
    try {
      InitRecord{request, reply}.save(state_path("init"));
    } catch (const std::system_error& error) {
      negotiated.fallbacks["resume"] = error.what();
    }
  }
  passthrough_ = negotiated.passthrough;
  {
    const std::lock_guard lock(info_mutex_);
    negotiated_ = std::move(negotiated);
    init_reply_ = reply;
  }
  device_->write_message(reply);
  if (!understood) return;
  initialized_ = true;
  tune();
}

OpenTable::Mode Session::Core::choose_mode(std::uint64_t nodeid) {
  const auto file = passthrough_ && options_.passthrough ? find(nodeid) : nullptr;
  if (!file || file->backing_fd() < 0) return {};
  fuse::BackingMap map{file->backing_fd(), 0, 0};
  const int id = ::ioctl(device_->fd(), fuse::kIocBackingOpen, &map);
  if (id > 0) return {true, id};
  passthrough_fallbacks_.fetch_add(1, memory_order_relaxed);
  const std::lock_guard lock(info_mutex_);
  last_error_ = "passthrough refused: " + std::generic_category().message(errno);
  return {};
}

void Session::Core::on_open_reply(std::uint64_t nodeid, std::span<std::byte> message) {
  const auto header = *fuse::body_as<fuse::OutHeader>(message);
  auto open = fuse::body_as<fuse::OpenOut>(message.subspan(sizeof(header)));
  if (header.error != 0 || !open) {
    device_->write_message(message);
    return;
  }
  const auto mode = opens_.open(nodeid, [&] { return choose_mode(nodeid); });
  if (mode.passthrough || find(nodeid)) {
    // Nothing is ever written to these files, so close(2) need not ask anybody: it must not wait while the
    // process behind the mount is being replaced, not even in a child that only closes what it inherited.
    open->open_flags |= fuse::kFopenNoflush;
    std::memcpy(message.data() + sizeof(header), &*open, sizeof(*open));
  }
  if (mode.passthrough) {
    passthrough_opens_.fetch_add(1, memory_order_relaxed);
    // The kernel fails an open that asks for caching and passthrough at once, and with FOPEN_DIRECT_IO it
    // would still send us the reads.
    open->open_flags = fuse::kFopenNoflush | fuse::kFopenPassthrough;
    open->backing_id = mode.backing_id;
    std::memcpy(message.data() + sizeof(header), &*open, sizeof(*open));
  }
  // Not open after all when the opener was killed.
  if (device_->write_message(message) == ENOENT) on_release(nodeid);
}

// Raises what the INIT reply alone cannot, and reads back what the kernel uses.
void Session::Core::tune() {
  std::map<std::string, Value> tuned;
  std::map<std::string, std::string> fallbacks;
  const auto number = options_.mountpoint.empty() ? std::nullopt : find_mount(options_.mountpoint);
  if (!number) {
    if (!options_.mountpoint.empty())
      fallbacks["read_ahead"] = "the mount is not visible in this mount namespace";
  } else {
    const auto raise = [&](const char* key, const std::string& path, std::uint64_t wanted,
                           std::uint64_t unit) {
      auto actual = read_number(path);
      if (actual && *actual < wanted && write_number(path, wanted) == 0) actual = read_number(path);
      if (!actual) {
        fallbacks[key] = "cannot read " + path;
        return;
      }
      tuned[key] = static_cast<std::int64_t>(*actual * unit);
      if (*actual < wanted) fallbacks[key] = "cannot raise " + path;
    };
    const auto bdi = std::to_string(number->major) + ":" + std::to_string(number->minor);
    raise("read_ahead_bytes", "/sys/class/bdi/" + bdi + "/read_ahead_kb", options_.read_ahead_bytes / 1024,
          1024);
    const auto connection = "/sys/fs/fuse/connections/" + std::to_string(number->minor);
    if (std::filesystem::exists(connection)) {
      raise("max_background", connection + "/max_background", options_.max_background, 1);
    }
  }
  const std::lock_guard lock(info_mutex_);
  tuned_ = std::move(tuned);
  fallbacks_.merge(fallbacks);
}

Session::Info Session::Core::info() const {
  utsname name{};
  ::uname(&name);
  const std::lock_guard lock(info_mutex_);
  Info info;
  auto& values = info.values;
  const auto integer = [](std::uint64_t value) { return static_cast<std::int64_t>(value); };
  const auto flag = [&](std::uint64_t bit) { return (negotiated_.flags & bit) != 0; };
  values["kernel"] = std::string(name.release);
  values["mountpoint"] = options_.mountpoint;
  values["initialized"] = initialized_.load();
  values["resumed"] = resumed_;
  values["ended"] = ended_.load();
  values["protocol_minor"] = integer(negotiated_.minor);
  values["max_write_bytes"] = integer(negotiated_.max_write_bytes);
  values["max_pages"] = integer(negotiated_.max_pages);
  values["max_read_bytes"] =
      integer(std::min<std::uint64_t>(options_.max_read_bytes, std::uint64_t{negotiated_.max_pages} * 4096));
  values["max_readahead_bytes"] = integer(negotiated_.max_readahead_bytes);
  values["max_background"] = integer(negotiated_.max_background);
  values["congestion_threshold"] = integer(negotiated_.congestion_threshold);
  values["async_read"] = flag(fuse::kAsyncRead);
  values["parallel_dirops"] = flag(fuse::kParallelDirops);
  values["passthrough"] = negotiated_.passthrough;
  values["resend"] = negotiated_.resend;
  values["journal"] = device_->journal() != nullptr;
  values["threads"] = integer(options_.threads);
  values["seats"] = integer(seats_.seats());
  values["last_error"] = last_error_;
  for (const auto& [key, value] : tuned_) values[key] = value;
  info.fallbacks = negotiated_.fallbacks;
  info.fallbacks.insert(fallbacks_.begin(), fallbacks_.end());
  return info;
}

std::map<std::string, std::uint64_t> Session::Core::statistics() const {
  std::map<std::string, std::uint64_t> values;
  auto& counters = device_->counters();
  for (const auto& reader : readers_) {
    values["reads"] += reader->reads.load(memory_order_relaxed);
    values["reads_waited"] += reader->waited.load(memory_order_relaxed);
    values["read_bytes"] += reader->bytes.load(memory_order_relaxed);
  }
  values["read_bytes"] += counters.late_bytes.load(memory_order_relaxed);
  values["read_errors"] = counters.read_errors.load(memory_order_relaxed);
  values["interrupts"] = counters.interrupts.load(memory_order_relaxed);
  values["interrupted_reads"] = counters.interrupted_reads.load(memory_order_relaxed);
  values["replies_unwanted"] = counters.replies_unwanted.load(memory_order_relaxed);
  values["reply_failures"] = counters.reply_failures.load(memory_order_relaxed);
  values["pending"] = device_->pending();
  values["parked"] = device_->parked();
  values["forwarded"] = forwarded_.load(memory_order_relaxed);
  values["relayed"] = relayed_.load(memory_order_relaxed);
  values["malformed"] = malformed_.load(memory_order_relaxed);
  values["control_lost"] = control_.lost() ? 1 : 0;
  values["passthrough_opens"] = passthrough_opens_.load(memory_order_relaxed);
  values["passthrough_fallbacks"] = passthrough_fallbacks_.load(memory_order_relaxed);
  values["open_nodes"] = opens_.size();
  values["journal_overflows"] = journal_overflows_.load(memory_order_relaxed);
  values["replayed_requests"] = replayed_requests_.load(memory_order_relaxed);
  const std::shared_lock lock(files_mutex_);
  values["files"] = files_.size();
  return values;
}

namespace {

SessionOptions checked(SessionOptions options) {
  if (options.threads == 0 || options.threads > 256) {
    throw Error(Errc::usage, "threads must be between 1 and 256");
  }
  if (options.max_read_bytes < 4096 || options.max_read_bytes > (1U << 20) ||
      options.max_read_bytes % 4096 != 0) {
    throw Error(Errc::usage, "max_read_bytes must be a multiple of 4096, at most 1 MiB");
  }
  if (options.max_background == 0) throw Error(Errc::usage, "max_background must be at least 1");
  if (options.journal == JournalMode::always && options.state_dir.empty()) {
    throw Error(Errc::usage, "a journal needs a state_dir");
  }
  if (!options.mountpoint.empty()) {
    // Resolving asks the parent directory only, so that a dead mount on it cannot block us.
    const std::filesystem::path path = std::filesystem::absolute(options.mountpoint).lexically_normal();
    const auto trimmed = path.has_filename() ? path : path.parent_path();
    options.mountpoint = std::filesystem::weakly_canonical(trimmed.parent_path()) / trimmed.filename();
  }
  return options;
}

void forget_state(const std::string& state_dir) {
  if (state_dir.empty()) return;
  std::filesystem::create_directories(state_dir);
  for (const char* name : {"init", "init.new", "journal", "opens"}) {
    std::filesystem::remove(std::filesystem::path(state_dir) / name);
  }
}

}  // namespace

Session::Session(std::unique_ptr<Core> core) : core_(std::move(core)) {}
Session::~Session() = default;

std::unique_ptr<Session> Session::mount(SessionOptions options) {
  options = checked(std::move(options));
  if (options.mountpoint.empty()) throw Error(Errc::usage, "a mount needs a mountpoint");
  forget_state(options.state_dir);
  UniqueFd device = mount_fuse({options.mountpoint, options.fsname, options.subtype, options.max_read_bytes,
                                options.allow_other, options.read_only});
  try {
    return std::unique_ptr<Session>(new Session(std::make_unique<Core>(std::move(device), options, false)));
  } catch (...) {
    ::umount2(options.mountpoint.c_str(), MNT_DETACH);
    throw;
  }
}

std::unique_ptr<Session> Session::resume(UniqueFd device, SessionOptions options) {
  options = checked(std::move(options));
  if (!std::filesystem::is_directory(options.state_dir)) {
    throw Error(Errc::not_found, "no session state in " + options.state_dir);
  }
  return std::unique_ptr<Session>(
      new Session(std::make_unique<Core>(std::move(device), std::move(options), true)));
}

std::unique_ptr<Session> Session::attach(UniqueFd device, SessionOptions options) {
  options = checked(std::move(options));
  forget_state(options.state_dir);
  return std::unique_ptr<Session>(
      new Session(std::make_unique<Core>(std::move(device), std::move(options), false)));
}

int Session::device_fd() const noexcept {
  return core_->device_->fd();
}
int Session::control_fd() noexcept {
  return core_->control_.take_peer_fd();
}
int Session::ended_fd() const noexcept {
  return core_->ended_event_.get();
}
bool Session::ended() const noexcept {
  return core_->ended_;
}
void Session::add_file(std::uint64_t nodeid, std::shared_ptr<ReadFile> file) {
  if (!file) throw Error(Errc::usage, "a file is needed");
  core_->add_file(nodeid, std::move(file));
}
void Session::remove_file(std::uint64_t nodeid) {
  core_->remove_file(nodeid);
}
void Session::start() {
  core_->start();
}
void Session::stop() {
  core_->stop();
}
void Session::unmount(bool lazy) {
  unmount_fuse(core_->options_.mountpoint, lazy);
}
Session::Info Session::info() const {
  return core_->info();
}
std::map<std::string, std::uint64_t> Session::statistics() const {
  return core_->statistics();
}

}  // namespace bootseer
