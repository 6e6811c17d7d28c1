// A FUSE session whose data path is C++ and whose control path is somebody else's (pyfuse3).
//
// The session owns /dev/fuse. READ of a registered inode is answered from its ReadFile in C++ threads; every other
// request goes unchanged over a SOCK_SEQPACKET socket to the control peer, which speaks FUSE on it as if it were the
// device, and its replies travel back. The session raises in the INIT reply what the peer's libfuse does not know.
// A successor resumes the same device descriptor after the process has died: see resume().
#pragma once

#include <bootseer/fd.hpp>
#include <bootseer/read_file.hpp>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

namespace bootseer {

struct SessionOptions {
  std::string mountpoint;
  std::string state_dir;  // where INIT and the journal are kept; empty: the session cannot be resumed
  std::string fsname = "bootseer";
  std::string subtype = "bootseer";
  unsigned threads = 4;
  std::uint32_t max_read_bytes = 1U << 20;
  std::uint32_t max_write_bytes = 128U << 10;  // a WRITE has to fit a socket message
  std::uint32_t read_ahead_bytes = 1U << 20;
  std::uint16_t max_background = 64;
  bool read_only = true;
  bool allow_other = true;
  bool passthrough = true;
  bool force_journal = false;  // use the journal even where the kernel can resend
};

struct SessionStatistics {
  std::uint64_t reads = 0;           // READs answered in C++
  std::uint64_t parked_reads = 0;    // of these, answered later because bytes were missing
  std::uint64_t read_bytes = 0;
  std::uint64_t read_errors = 0;
  std::uint64_t interrupted = 0;
  std::uint64_t forwarded = 0;       // requests that went to the control peer
  std::uint64_t passthrough_opens = 0;
  std::uint64_t passthrough_failures = 0;
  std::uint64_t resent = 0;          // requests that the kernel or the journal gave us again
};

class Session {
 public:
  // Opens /dev/fuse and mounts it. Throws std::system_error.
  static std::shared_ptr<Session> mount(const SessionOptions& options);

  // Takes over a connection whose server died. `device` is a duplicate of its descriptor. Throws Error(not_found)
  // when state_dir holds no INIT.
  static std::shared_ptr<Session> resume(UniqueFd device, const SessionOptions& options);

  // Speaks FUSE on any message-preserving descriptor, mounted or not: for tests.
  static std::shared_ptr<Session> attach(UniqueFd device, const SessionOptions& options);

  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  int control_fd() const noexcept;  // for the control peer, as /dev/fd/N
  int device_fd() const noexcept;

  void add_file(std::uint64_t inode, std::shared_ptr<ReadFile> file);
  void remove_file(std::uint64_t inode);

  void start();
  void stop() noexcept;  // joins the threads and answers nothing more; the mount stays
  void unmount(bool lazy);

  SessionStatistics statistics() const noexcept;
  // What was negotiated, read back where the kernel shows it, and why a capability is not used.
  std::map<std::string, std::string> info() const;

  class State;  // shared with reads that are answered after the session is gone

 private:
  explicit Session(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

}  // namespace bootseer
