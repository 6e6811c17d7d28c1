#include "bootseer/namespaces.hpp"

#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <linux/openat2.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <utility>

#include "bootseer/error.hpp"
#include "bootseer/fd.hpp"

namespace bootseer {
namespace {

constexpr std::array<int, 4> kForwarded{SIGINT, SIGTERM, SIGHUP, SIGQUIT};

// What a child reports when it cannot go on.
struct Failure {
  int error;
  char step[60];
};

constexpr std::array<const char*, 6> kDevices{"/dev/null",   "/dev/zero",    "/dev/full",
                                              "/dev/random", "/dev/urandom", "/dev/tty"};
constexpr std::array<std::pair<const char*, const char*>, 5> kDevLinks{{{"fd", "/proc/self/fd"},
                                                                        {"stdin", "/proc/self/fd/0"},
                                                                        {"stdout", "/proc/self/fd/1"},
                                                                        {"stderr", "/proc/self/fd/2"},
                                                                        {"ptmx", "pts/ptmx"}}};
constexpr char kExec[] = "exec";
constexpr char kWorkingDirectory[] = "working directory";

// Everything the child needs, made before it exists: between clone() and exec only system calls are allowed,
// since other threads of the parent may have held any lock.
struct Plan {
  std::vector<char*> argv;
  std::vector<char*> env;
  std::vector<std::string> programs;  // candidates for argv[0] along PATH
  int report = -1;
};

volatile sig_atomic_t g_command = 0;

void forward(int number) {
  if (g_command > 0) ::kill(static_cast<pid_t>(g_command), number);
}

[[noreturn]] void fail(int report, const char* step) {
  Failure failure{};
  failure.error = errno;
  std::strncpy(failure.step, step, sizeof failure.step - 1);
  (void)!::write(report, &failure, sizeof failure);
  ::_exit(127);
}

void check(int result, int report, const char* step) {
  if (result != 0) fail(report, step);
}

// "/proc/self/fd/N" without allocating.
struct FdPath {
  explicit FdPath(int fd) {
    std::strcpy(text, "/proc/self/fd/");
    char digits[12];
    int count = 0;
    do digits[count++] = static_cast<char>('0' + fd % 10);
    while ((fd /= 10) > 0);
    char* at = text + std::strlen(text);
    while (count > 0) *at++ = digits[--count];
    *at = '\0';
  }
  char text[32];
};

int open_in_root(int root, const char* path) {
  open_how how{};
  how.flags = O_PATH | O_CLOEXEC;
  how.resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS;
  return static_cast<int>(::syscall(SYS_openat2, root, path, &how, sizeof how));
}

// Opens `path` below `root` and makes what is missing of it. Symbolic links of the image lead nowhere else.
int make_in_root(int root, const char* path, bool is_directory) {
  char prefix[PATH_MAX];
  const std::size_t length = std::strlen(path);
  if (length >= sizeof prefix) {
    errno = ENAMETOOLONG;
    return -1;
  }
  int at = open_in_root(root, "/");
  for (std::size_t start = 0; start < length && at >= 0;) {
    while (path[start] == '/') ++start;
    if (start == length) break;
    std::size_t end = start;
    while (end < length && path[end] != '/') ++end;
    std::memcpy(prefix, path, end);
    prefix[end] = '\0';
    int next = open_in_root(root, prefix);
    if (next < 0 && errno == ENOENT) {
      if (end == length && !is_directory) {
        const int made = ::openat(at, prefix + start, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
        if (made >= 0) ::close(made);
      } else {
        (void)::mkdirat(at, prefix + start, 0755);
      }
      next = open_in_root(root, prefix);
    }
    ::close(at);
    at = next;
    start = end;
  }
  return at;
}

struct Root {
  int fd;
  int report;

  void mount(const char* source, const char* target, const char* type, unsigned long flags,
             const char* options, const char* step) const {
    const int at = make_in_root(fd, target, true);
    check(at < 0 ? -1 : ::mount(source, FdPath(at).text, type, flags, options), report, step);
    ::close(at);
  }

  void bind(const char* source, const char* target, bool read_only) const {
    struct stat status {};
    const bool is_directory = ::stat(source, &status) == 0 && S_ISDIR(status.st_mode);
    const int below = make_in_root(fd, target, is_directory);
    check(below < 0 ? -1 : ::mount(source, FdPath(below).text, nullptr, MS_BIND | MS_REC, nullptr), report,
          "bind mount");
    ::close(below);
    if (!read_only) return;
    const int above = open_in_root(fd, target);
    constexpr unsigned long kFlags = MS_REMOUNT | MS_BIND | MS_RDONLY;
    check(above < 0 ? -1 : ::mount(nullptr, FdPath(above).text, nullptr, kFlags, nullptr), report,
          "read-only bind mount");
    ::close(above);
  }
};

void set_up_root(const SpawnOptions& options, const Plan& plan) {
  const int report = plan.report;
  check(::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr), report, "private mounts");
  const char* path = options.root.c_str();
  check(::mount(path, path, nullptr, MS_BIND | MS_REC, nullptr), report, "bind root");
  const Root root{::open(path, O_PATH | O_DIRECTORY | O_CLOEXEC), report};
  if (root.fd < 0) fail(report, "open root");
  root.mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr, "mount /proc");
  root.bind("/sys", "/sys", true);
  root.mount("tmpfs", "/dev", "tmpfs", MS_NOSUID, "mode=755,size=65536k", "mount /dev");
  root.mount("shm", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777", "mount /dev/shm");
  // Pseudo terminals are a comfort; a kernel without another instance of devpts does without.
  if (const int pts = make_in_root(root.fd, "/dev/pts", true); pts >= 0) {
    ::mount("devpts", FdPath(pts).text, "devpts", MS_NOSUID | MS_NOEXEC,
            "newinstance,ptmxmode=0666,mode=0620");
    ::close(pts);
  }
  for (const char* device : kDevices) {
    if (::access(device, F_OK) == 0) root.bind(device, device, false);
  }
  if (const int dev = open_in_root(root.fd, "/dev"); dev >= 0) {
    for (const auto& [name, target] : kDevLinks) (void)::symlinkat(target, dev, name);
    ::close(dev);
  }
  for (const Bind& volume : options.binds) {
    root.bind(volume.source.c_str(), volume.target.c_str(), volume.read_only);
  }
  ::close(make_in_root(root.fd, options.cwd.c_str(), true));  // as OCI runtimes do
  if (!options.hostname.empty()) {
    check(::sethostname(options.hostname.data(), options.hostname.size()), report, "sethostname");
  }
  check(::fchdir(root.fd), report, "enter root");
  check(static_cast<int>(::syscall(SYS_pivot_root, ".", ".")), report, "pivot_root");
  check(::umount2(".", MNT_DETACH), report, "leave the old root");
  check(::chdir("/"), report, "enter root");
}

[[noreturn]] void become_command(const SpawnOptions& options, const Plan& plan) {
  for (const int number : kForwarded) ::signal(number, SIG_DFL);
  ::signal(SIGPIPE, SIG_DFL);
  ::signal(SIGCHLD, SIG_DFL);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  check(::setgroups(0, nullptr), plan.report, "setgroups");
  check(::setgid(options.gid), plan.report, "setgid");
  check(::setuid(options.uid), plan.report, "setuid");
  check(::chdir(options.cwd.c_str()), plan.report, kWorkingDirectory);
  int error = ENOENT;
  for (const std::string& program : plan.programs) {
    ::execve(program.c_str(), plan.argv.data(), plan.env.data());
    if (errno != ENOENT && errno != ENOTDIR) error = errno;
  }
  errno = error;
  fail(plan.report, kExec);
}

[[noreturn]] void be_init(const SpawnOptions& options, const Plan& plan) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  set_up_root(options, plan);
  for (const int number : kForwarded) ::signal(number, forward);
  ::signal(SIGCHLD, SIG_DFL);  // ignored by our parent, it would reap before us
  const pid_t command = static_cast<pid_t>(::syscall(SYS_clone, SIGCHLD, nullptr, nullptr, nullptr, nullptr));
  if (command < 0) fail(plan.report, "fork");
  if (command == 0) become_command(options, plan);
  g_command = command;
  ::close(plan.report);
  for (;;) {
    int status = 0;
    const pid_t ended = ::wait(&status);
    if (ended < 0 && errno == EINTR) continue;
    if (ended == command) ::_exit(WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
    if (ended < 0) ::_exit(255);
  }
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const std::string& text : strings) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

std::vector<std::string> candidates(const SpawnOptions& options) {
  const std::string& program = options.argv.front();
  if (program.find('/') != std::string::npos) return {program};
  std::string path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
  for (const std::string& entry : options.env) {
    if (entry.starts_with("PATH=")) path = entry.substr(5);
  }
  std::vector<std::string> found;
  for (std::size_t at = 0; at <= path.size();) {
    std::size_t end = path.find(':', at);
    if (end == std::string::npos) end = path.size();
    if (end > at) found.push_back(path.substr(at, end - at) + "/" + program);
    at = end + 1;
  }
  return found;
}

}  // namespace

pid_t spawn_namespaced(const SpawnOptions& options) {
  if (options.argv.empty()) throw Error(Errc::usage, "no command");
  int report[2];
  if (::pipe2(report, O_CLOEXEC) != 0) throw_errno("pipe");
  UniqueFd reader(report[0]);
  UniqueFd writer(report[1]);

  Plan plan;
  plan.argv = pointers(options.argv);
  plan.env = pointers(options.env);
  plan.programs = candidates(options);
  plan.report = writer.get();

  constexpr unsigned long kFlags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUTS | CLONE_NEWIPC | SIGCHLD;
  const auto child = static_cast<pid_t>(::syscall(SYS_clone, kFlags, nullptr, nullptr, nullptr, nullptr));
  if (child < 0) throw Error(Errc::internal, std::string("new namespaces: ") + std::strerror(errno));
  if (child == 0) be_init(options, plan);
  writer.reset();

  Failure failure{};
  ssize_t n = 0;
  do {
    n = ::read(reader.get(), &failure, sizeof failure);
  } while (n < 0 && errno == EINTR);
  if (n == 0) return child;  // closed by exec
  ::waitpid(child, nullptr, 0);
  const std::string step(failure.step);
  if (step == kExec) throw std::system_error(failure.error, std::generic_category(), step);
  const std::string why = std::strerror(failure.error);
  if (step == kWorkingDirectory) throw Error(Errc::usage, step + " " + options.cwd + ": " + why);
  throw Error(Errc::internal, step + ": " + why);
}

}  // namespace bootseer
