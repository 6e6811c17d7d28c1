// A command in a root directory of its own: the plainest container runtime.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace bootseer {

struct Bind {
  std::string source;
  std::string target;  // absolute, in the new root
  bool read_only = false;
};

struct SpawnOptions {
  std::string root;
  std::vector<std::string> argv;
  std::vector<std::string> env;  // NAME=VALUE
  std::string cwd = "/";
  std::vector<Bind> binds;
  std::string hostname;
  uid_t uid = 0;
  gid_t gid = 0;
};

// Starts argv in new mount, pid, uts and ipc namespaces with /proc, a minimal /dev and read-only /sys. The
// returned child is the namespace's init: it passes SIGINT, SIGTERM, SIGHUP and SIGQUIT on to the command,
// reaps, and exits with the command's code (128 + number after a signal). Targets of binds and the working
// directory are made where the image has none; its symbolic links lead nowhere out of the root. Throws
// std::system_error when exec fails, Error(usage) for a working directory that cannot be entered, and
// Error(internal) when the namespaces cannot be set up.
pid_t spawn_namespaced(const SpawnOptions& options);

}  // namespace bootseer
