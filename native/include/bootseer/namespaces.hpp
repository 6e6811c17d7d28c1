// A command in a root directory of its own: the plainest container runtime.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace bootseer {

struct Bind {
  std::string source;  // of the host, symbolic links followed there
  std::string target;  // in the new root, symbolic links followed inside of it; made when it is missing
  bool read_only = false;
};

struct SpawnOptions {
  std::string root;
  std::vector<std::string> argv;
  std::vector<std::string> env;  // NAME=VALUE
  std::string cwd = "/";         // made when it is missing
  std::vector<Bind> binds;
  std::string hostname;
  uid_t uid = 0;
  gid_t gid = 0;
  std::vector<gid_t> groups;  // supplementary
};

// Starts argv in new mount, pid, uts and ipc namespaces with /proc, a minimal /dev and read-only /sys. The
// returned child is the namespace's init: it passes SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 on
// to the command, reaps, and exits with the command's code (128 + number after a signal). It is killed, and
// with it all of the namespace, when the *thread* that called this ends (PR_SET_PDEATHSIG): call it from a
// thread that stays.
//
// Throws std::system_error when the command cannot be executed or its working directory not be entered, and
// Error(usage) that names the step when the root cannot be set up. Separates what an image sees, not what a
// hostile root user in it can do.
pid_t spawn_namespaced(const SpawnOptions& options);

}  // namespace bootseer
