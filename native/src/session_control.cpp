#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <bootseer/error.hpp>
#include <bootseer/session_control.hpp>
#include <cerrno>

namespace bootseer {
namespace {

// A message lives in kernel memory that has to be found in large pieces; well above a page-sized request,
// well below what a fragmented machine may refuse.
constexpr std::size_t kWantedMessageBytes = (128U << 10) + 4096;

std::size_t raise_send_buffer(int fd) {
  const int wanted = 4 << 20;
  // FORCE goes past net.core.wmem_max and needs CAP_NET_ADMIN.
  if (::setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &wanted, sizeof(wanted)) != 0) {
    ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &wanted, sizeof(wanted));
  }
  int actual = 0;
  socklen_t length = sizeof(actual);
  if (::getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &actual, &length) != 0) throw_errno("cannot read SO_SNDBUF");
  return static_cast<std::size_t>(actual);
}

}  // namespace

ControlChannel::ControlChannel() {
  std::array<int, 2> pair{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair.data()) != 0) {
    throw_errno("cannot create the control socket pair");
  }
  ours_.reset(pair[0]);
  theirs_.reset(pair[1]);
  const auto buffer = std::min(raise_send_buffer(pair[0]), raise_send_buffer(pair[1]));
  max_message_bytes_ = std::min(kWantedMessageBytes, buffer - 64);
}

int ControlChannel::take_peer_fd() noexcept {
  if (theirs_) peer_number_ = theirs_.release();
  return peer_number_;
}

ControlChannel::Outcome ControlChannel::send_now(std::span<const std::byte> message) noexcept {
  while (true) {
    if (::send(ours_.get(), message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL) >= 0)
      return Outcome::sent;
    switch (errno) {
      case EINTR:
        continue;
      case EAGAIN:
      case ENOBUFS:
        return Outcome::full;
      case EMSGSIZE:
        return Outcome::too_large;
      default:
        return Outcome::lost;
    }
  }
}

ControlChannel::Sent ControlChannel::send(std::span<const std::byte> message) {
  std::unique_lock lock(mutex_);
  room_.wait(lock, [this] { return backlog_bytes_ < kBacklogBytes || lost_ || shut_; });
  if (lost_) return Sent::now;
  if (backlog_.empty()) {
    switch (send_now(message)) {
      case Outcome::sent:
        return Sent::now;
      case Outcome::too_large:
        return Sent::too_large;
      case Outcome::lost:
        lost_ = true;
        return Sent::now;
      case Outcome::full:
        break;
    }
  }
  backlog_.emplace_back(message.begin(), message.end());
  backlog_bytes_ += message.size();
  return Sent::queued;
}

bool ControlChannel::flush() {
  const std::lock_guard lock(mutex_);
  while (!backlog_.empty() && !lost_) {
    const auto outcome = send_now(backlog_.front());
    if (outcome == Outcome::full) break;
    if (outcome == Outcome::lost) lost_ = true;
    backlog_bytes_ -= backlog_.front().size();
    backlog_.pop_front();
  }
  if (lost_) {
    backlog_.clear();
    backlog_bytes_ = 0;
  }
  room_.notify_all();
  return !backlog_.empty();
}

bool ControlChannel::has_backlog() const {
  const std::lock_guard lock(mutex_);
  return !backlog_.empty();
}

void ControlChannel::mark_lost() {
  const std::lock_guard lock(mutex_);
  lost_ = true;
  room_.notify_all();
}

bool ControlChannel::lost() const {
  const std::lock_guard lock(mutex_);
  return lost_;
}

void ControlChannel::shut() {
  const std::lock_guard lock(mutex_);
  shut_ = true;
  room_.notify_all();
}

}  // namespace bootseer
