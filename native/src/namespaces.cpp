#include "bootseer/namespaces.hpp"

#include <fcntl.h>
#include <grp.h>
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

struct Device {
  const char* source;
  std::string target;
};

// Everything the child needs, made before it exists: between clone() and exec only system calls are allowed,
// since other threads of the parent may have held any lock.
struct Plan {
  std::vector<char*> argv;
  std::vector<char*> env;
  std::vector<std::string> programs;  // candidates for argv[0] along PATH
  std::string proc, sys, dev, pts, shm;
  std::vector<Device> devices;
  std::vector<Bind> binds;  // targets below the old root
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

// Makes the target of a bind where the image has none.
void prepare_target(const char* source, const char* target) {
  struct stat status {};
  if (::stat(source, &status) == 0 && S_ISDIR(status.st_mode)) {
    ::mkdir(target, 0755);
  } else {
    const int fd = ::open(target, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (fd >= 0) ::close(fd);
  }
}

void bind(const char* source, const char* target, bool read_only, int report) {
  check(::mount(source, target, nullptr, MS_BIND | MS_REC, nullptr), report, "bind mount");
  if (read_only) {
    check(::mount(nullptr, target, nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY, nullptr), report,
          "read-only bind mount");
  }
}

void set_up_root(const SpawnOptions& options, const Plan& plan) {
  const int report = plan.report;
  check(::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr), report, "private mounts");
  check(::mount(options.root.c_str(), options.root.c_str(), nullptr, MS_BIND | MS_REC, nullptr), report,
        "bind root");
  ::mkdir(plan.proc.c_str(), 0555);
  ::mkdir(plan.sys.c_str(), 0555);
  ::mkdir(plan.dev.c_str(), 0755);
  check(::mount("proc", plan.proc.c_str(), "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr), report,
        "mount /proc");
  bind("/sys", plan.sys.c_str(), true, report);
  check(::mount("tmpfs", plan.dev.c_str(), "tmpfs", MS_NOSUID, "mode=755,size=65536k"), report, "mount /dev");
  ::mkdir(plan.pts.c_str(), 0755);
  ::mkdir(plan.shm.c_str(), 01777);
  // Pseudo terminals are a comfort; a kernel without another instance of devpts does without.
  ::mount("devpts", plan.pts.c_str(), "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620");
  check(::mount("shm", plan.shm.c_str(), "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777"), report,
        "mount /dev/shm");
  for (const Device& device : plan.devices) {
    if (::access(device.source, F_OK) != 0) continue;
    prepare_target(device.source, device.target.c_str());
    bind(device.source, device.target.c_str(), false, report);
  }
  for (const Bind& volume : plan.binds) {
    prepare_target(volume.source.c_str(), volume.target.c_str());
    bind(volume.source.c_str(), volume.target.c_str(), volume.read_only, report);
  }
  if (!options.hostname.empty()) {
    check(::sethostname(options.hostname.data(), options.hostname.size()), report, "sethostname");
  }
  check(::chdir(options.root.c_str()), report, "enter root");
  check(static_cast<int>(::syscall(SYS_pivot_root, ".", ".")), report, "pivot_root");
  check(::umount2(".", MNT_DETACH), report, "leave the old root");
  check(::chdir("/"), report, "enter root");
}

[[noreturn]] void become_command(const SpawnOptions& options, const Plan& plan) {
  for (const int number : kForwarded) ::signal(number, SIG_DFL);
  ::signal(SIGPIPE, SIG_DFL);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  check(::setgroups(0, nullptr), plan.report, "setgroups");
  check(::setgid(options.gid), plan.report, "setgid");
  check(::setuid(options.uid), plan.report, "setuid");
  check(::chdir(options.cwd.c_str()), plan.report, "working directory");
  int error = ENOENT;
  for (const std::string& program : plan.programs) {
    ::execve(program.c_str(), plan.argv.data(), plan.env.data());
    if (errno != ENOENT && errno != ENOTDIR) error = errno;
  }
  errno = error;
  fail(plan.report, "exec");
}

[[noreturn]] void be_init(const SpawnOptions& options, const Plan& plan) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  set_up_root(options, plan);
  for (const int number : kForwarded) ::signal(number, forward);
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
  plan.proc = options.root + "/proc";
  plan.sys = options.root + "/sys";
  plan.dev = options.root + "/dev";
  plan.pts = plan.dev + "/pts";
  plan.shm = plan.dev + "/shm";
  for (const char* name : {"null", "zero", "full", "random", "urandom", "tty"}) {
    plan.devices.push_back({name, plan.dev + "/" + name});
  }
  static constexpr std::array<const char*, 6> kSources{"/dev/null",   "/dev/zero",    "/dev/full",
                                                       "/dev/random", "/dev/urandom", "/dev/tty"};
  for (std::size_t i = 0; i < kSources.size(); ++i) plan.devices[i].source = kSources[i];
  for (const Bind& volume : options.binds) {
    plan.binds.push_back({volume.source, options.root + volume.target, volume.read_only});
  }
  plan.report = writer.get();

  constexpr unsigned long kFlags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUTS | CLONE_NEWIPC | SIGCHLD;
  const auto child = static_cast<pid_t>(::syscall(SYS_clone, kFlags, nullptr, nullptr, nullptr, nullptr));
  if (child < 0) throw_errno("clone");
  if (child == 0) be_init(options, plan);
  writer.reset();

  Failure failure{};
  ssize_t n = 0;
  do {
    n = ::read(reader.get(), &failure, sizeof failure);
  } while (n < 0 && errno == EINTR);
  if (n == 0) return child;  // closed by exec
  ::waitpid(child, nullptr, 0);
  throw std::system_error(failure.error, std::generic_category(), failure.step);
}

}  // namespace bootseer
