// The control peer's side of a session: a pair of connected SOCK_SEQPACKET sockets, one message per request.
#pragma once

#include <bootseer/fd.hpp>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <vector>

namespace bootseer {

class ControlChannel {
 public:
  // Messages that the peer has not taken are queued here; a sender waits once they exceed this.
  static constexpr std::size_t kBacklogBytes = 32U << 20;

  ControlChannel();

  int fd() const noexcept { return ours_.get(); }
  // The peer's end. The first call hands it over: whoever speaks FUSE on it closes it (libfuse does).
  int take_peer_fd() noexcept;

  // The largest message that fits, in bytes.
  std::size_t max_message_bytes() const noexcept { return max_message_bytes_; }

  enum class Sent { now, queued, too_large };
  // Sends now, or queues and returns: then somebody has to flush() when the socket takes more. Once the peer
  // is lost, messages are dropped: their requests stay unanswered until a successor of this session gets
  // them.
  Sent send(std::span<const std::byte> message);
  // Sends what is queued as far as the peer takes it. Returns whether something is left.
  bool flush();
  bool has_backlog() const;
  void mark_lost();
  bool lost() const;
  // Lets waiting senders go; from now on nothing waits.
  void shut();

 private:
  enum class Outcome { sent, full, lost, too_large };
  Outcome send_now(std::span<const std::byte> message) noexcept;

  UniqueFd ours_;
  UniqueFd theirs_;
  int peer_number_ = -1;
  std::size_t max_message_bytes_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable room_;
  std::deque<std::vector<std::byte>> backlog_;
  std::size_t backlog_bytes_ = 0;
  bool lost_ = false;
  bool shut_ = false;
};

}  // namespace bootseer
