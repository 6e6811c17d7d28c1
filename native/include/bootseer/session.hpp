// A FUSE session whose READs are answered here, in C++ threads, and whose other requests go unchanged to a
// control peer (pyfuse3) that is given a descriptor as `/dev/fd/N`. See native/CONCURRENCY.md for threads and
// locks.
#pragma once

#include <bootseer/fd.hpp>
#include <bootseer/read_file.hpp>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <variant>

namespace bootseer {

// Whether requests in flight are journaled in the state directory (needed where the kernel cannot resend
// them).
enum class JournalMode { automatic, always, never };

struct SessionOptions {
  std::string mountpoint;  // absolute, without symlinks
  std::string state_dir;   // empty: this mount cannot be resumed
  unsigned threads = 4;    // see session_seats.hpp for how many of them wait at a time
  std::uint32_t max_read_bytes = 1U << 20;
  std::uint16_t max_background = 64;
  std::uint32_t read_ahead_bytes = 1U << 20;
  // Offer complete local files to the kernel. Raises the mount's stacking depth by one, so that an EROFS
  // image on a file of this mount is refused by the kernel: use it for plain files.
  bool passthrough = true;
  bool allow_other = true;
  bool read_only = true;
  std::string fsname = "bootseer";
  std::string subtype = "bootseer";
  JournalMode journal = JournalMode::automatic;
};

class Session {
 public:
  using Value = std::variant<bool, std::int64_t, std::string>;
  struct Info {
    std::map<std::string, Value> values;
    std::map<std::string, std::string> fallbacks;  // capability → why it is not used
  };

  // Opens /dev/fuse and mounts it. Throws Error(usage) or std::system_error.
  static std::unique_ptr<Session> mount(SessionOptions options);
  // Goes on with a mount that another process made and no longer serves; `device` is its /dev/fuse
  // descriptor. Throws Error(not_found) when state_dir holds no record of it, Error(integrity) when the
  // record is damaged.
  static std::unique_ptr<Session> resume(UniqueFd device, SessionOptions options);
  // Serves a descriptor that behaves like a freshly mounted /dev/fuse.
  static std::unique_ptr<Session> attach(UniqueFd device, SessionOptions options);

  // Stops serving and leaves the mount as it is: readers wait for a successor for as long as somebody else
  // keeps the device open, else they get ENOTCONN.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  int device_fd() const noexcept;
  // The descriptor for the control peer. The first call hands it over: the peer closes it.
  int control_fd() noexcept;
  // Becomes readable when the kernel has ended the session (unmounted or aborted).
  int ended_fd() const noexcept;
  bool ended() const noexcept;

  // READs of this node are answered from `file` from now on. OPENs of it for writing are refused with EROFS.
  void add_file(std::uint64_t nodeid, std::shared_ptr<ReadFile> file);
  // Later READs go to the control peer; reads that wait for the file are still answered by it.
  void remove_file(std::uint64_t nodeid);

  // Starts the threads. After resume(): first replays INIT to the control peer and has the kernel send the
  // unanswered requests again, so the files should be there before.
  void start();
  // Ends the threads; does not wait for files that still owe answers (those are sent when they come).
  void stop();
  void unmount(bool lazy);

  Info info() const;
  std::map<std::string, std::uint64_t> statistics() const;

 private:
  class Core;
  explicit Session(std::unique_ptr<Core> core);
  std::unique_ptr<Core> core_;
};

}  // namespace bootseer
