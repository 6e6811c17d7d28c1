#include "bootseer/namespaces.hpp"

#include <fcntl.h>
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

constexpr std::array<int, 6> kForwarded{SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};
constexpr const char* kDefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

// What a child reports when it cannot go on.
struct Failure {
  int error;
  bool of_command;  // else of the root's set-up
  char step[240];
};

// A part of the host's tree on its way into the new root.
struct Attachment {
  std::string source;
  std::string target;
  bool read_only = false;
  bool optional = false;
  int tree = -1;
};

// Everything the child needs, made before it exists. Between clone() and exec only system calls are allowed:
// other threads of the parent may have held any lock, those of malloc and of glibc's setuid() among them.
struct Plan {
  std::string root;
  std::string hostname;
  uid_t uid;
  gid_t gid;
  std::vector<gid_t> groups;
  std::vector<char*> argv;
  std::vector<char*> env;
  std::vector<std::string> programs;  // candidates for argv[0] along PATH
  std::vector<Attachment> system;     // /sys and devices
  std::vector<Attachment> volumes;    // after the rest: they may cover it
  std::string cwd;                    // mutable: directories are made in place
  int report = -1;
};

volatile sig_atomic_t g_command = 0;

// A terminal signals the command itself, which is in init's process group; only what was sent to init alone
// needs passing on.
void forward(int number, siginfo_t* info, void*) {
  if (g_command > 0 && info->si_code <= 0) ::kill(static_cast<pid_t>(g_command), number);
}

[[noreturn]] void fail(const Plan& plan, bool of_command, const char* step, const char* object = "") {
  Failure failure{};
  failure.error = errno;
  failure.of_command = of_command;
  std::strncpy(failure.step, step, sizeof failure.step - 1);
  if (*object != '\0') {
    std::strncat(failure.step, " ", sizeof failure.step - std::strlen(failure.step) - 1);
    std::strncat(failure.step, object, sizeof failure.step - std::strlen(failure.step) - 1);
  }
  (void)!::write(plan.report, &failure, sizeof failure);
  ::_exit(127);
}

void check(long result, const Plan& plan, const char* step, const char* object = "") {
  if (result < 0) fail(plan, false, step, object);
}

// Makes the directories that lead to `path`, and with `whole` that at its end; what cannot be made shows when
// it is used. `path` is cut in place and mended.
void make_directories(std::string& path, bool whole) {
  for (std::size_t at = path.find('/', 1); at != std::string::npos; at = path.find('/', at + 1)) {
    path[at] = '\0';
    ::mkdir(path.c_str(), 0755);
    path[at] = '/';
  }
  if (whole) ::mkdir(path.c_str(), 0755);
}

// Takes hold of the source while the host's root is still the root.
void detach(Attachment& attachment, const Plan& plan) {
  attachment.tree =
      ::open_tree(AT_FDCWD, attachment.source.c_str(), OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE);
  if (attachment.tree >= 0 || (attachment.optional && errno == ENOENT)) return;
  fail(plan, false, "open", attachment.source.c_str());
}

// Puts it in place when the new root is the root, so that no symbolic link of the image leads to the host.
void attach(Attachment& attachment, const Plan& plan) {
  if (attachment.tree < 0) return;
  const char* target = attachment.target.c_str();
  struct stat status {};
  const bool is_directory = ::fstat(attachment.tree, &status) == 0 && S_ISDIR(status.st_mode);
  make_directories(attachment.target, is_directory);
  if (!is_directory && ::access(target, F_OK) != 0) {
    const int fd = ::open(target, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd >= 0) ::close(fd);
  }
  mount_attr attributes{};
  attributes.attr_set = MOUNT_ATTR_RDONLY;
  bool is_read_only = !attachment.read_only;
  if (attachment.read_only && ::mount_setattr(attachment.tree, "", AT_EMPTY_PATH | AT_RECURSIVE, &attributes,
                                              sizeof attributes) == 0) {
    is_read_only = true;
  }
  check(::move_mount(attachment.tree, "", AT_FDCWD, target, MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_SYMLINKS),
        plan, "bind", target);
  ::close(attachment.tree);
  if (!is_read_only) {  // before Linux 5.12: the topmost mount only
    check(::mount(nullptr, target, nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY, nullptr), plan,
          "read-only bind", target);
  }
}

void set_up_root(Plan& plan) {
  check(::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr), plan, "private mounts");
  for (Attachment& attachment : plan.system) detach(attachment, plan);
  for (Attachment& attachment : plan.volumes) detach(attachment, plan);
  const char* root = plan.root.c_str();
  check(::mount(root, root, nullptr, MS_BIND | MS_REC, nullptr), plan, "bind", root);
  check(::chdir(root), plan, "enter", root);
  check(::syscall(SYS_pivot_root, ".", "."), plan, "pivot_root", root);
  check(::umount2(".", MNT_DETACH), plan, "leave the old root");
  check(::chdir("/"), plan, "enter the new root");

  for (const char* name : {"/proc", "/sys", "/dev"}) ::mkdir(name, 0755);
  check(::mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr), plan, "mount /proc");
  check(::mount("tmpfs", "/dev", "tmpfs", MS_NOSUID, "mode=755,size=65536k"), plan, "mount /dev");
  ::mkdir("/dev/shm", 01777);
  check(::mount("shm", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777"), plan, "mount /dev/shm");
  // Comforts, which not every kernel has.
  ::mkdir("/dev/pts", 0755);
  ::mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620");
  ::mkdir("/dev/mqueue", 0755);
  ::mount("mqueue", "/dev/mqueue", "mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr);
  constexpr std::array<std::array<const char*, 2>, 5> kLinks{{{"/proc/self/fd", "/dev/fd"},
                                                              {"/proc/self/fd/0", "/dev/stdin"},
                                                              {"/proc/self/fd/1", "/dev/stdout"},
                                                              {"/proc/self/fd/2", "/dev/stderr"},
                                                              {"pts/ptmx", "/dev/ptmx"}}};
  for (const auto& [target, name] : kLinks) check(::symlink(target, name), plan, "make", name);
  for (Attachment& attachment : plan.system) attach(attachment, plan);
  for (Attachment& attachment : plan.volumes) attach(attachment, plan);
  if (!plan.hostname.empty()) {
    check(::sethostname(plan.hostname.data(), plan.hostname.size()), plan, "sethostname");
  }
}

[[noreturn]] void become_command(Plan& plan) {
  for (const int number : kForwarded) ::signal(number, SIG_DFL);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  if (::chdir(plan.cwd.c_str()) != 0) {
    make_directories(plan.cwd, true);
    if (::chdir(plan.cwd.c_str()) != 0) fail(plan, true, "working directory", plan.cwd.c_str());
  }
  // Not glibc's functions of these names: they wait for threads that this process does not have.
  check(::syscall(SYS_setgroups, plan.groups.size(), plan.groups.data()), plan, "setgroups");
  check(::syscall(SYS_setresgid, plan.gid, plan.gid, plan.gid), plan, "setgid");
  check(::syscall(SYS_setresuid, plan.uid, plan.uid, plan.uid), plan, "setuid");
  int error = ENOENT;
  for (const std::string& program : plan.programs) {
    ::execve(program.c_str(), plan.argv.data(), plan.env.data());
    if (errno != ENOENT && errno != ENOTDIR) error = errno;
  }
  errno = error;
  fail(plan, true, plan.argv.front());
}

// Runs with all signals blocked, in memory that is a copy of the parent's.
// The interpreter's handlers, and whatever else was inherited. Not signal(2): glibc refuses the two numbers
// that it keeps for itself, and a parent may have ignored those too.
void reset_signals() {
  const std::array<std::byte, 64> by_default{};  // the kernel's struct sigaction with SIG_DFL, which is 0
  constexpr std::size_t kMaskBytes = 8;
  for (int number = 1; number < NSIG; ++number) {
    ::syscall(SYS_rt_sigaction, number, by_default.data(), nullptr, kMaskBytes);
  }
}

[[noreturn]] void be_init(Plan& plan) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  reset_signals();
  set_up_root(plan);
  struct sigaction action {};
  action.sa_sigaction = forward;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  for (const int number : kForwarded) ::sigaction(number, &action, nullptr);
  const pid_t command = static_cast<pid_t>(::syscall(SYS_clone, SIGCHLD, nullptr, nullptr, nullptr, nullptr));
  if (command < 0) fail(plan, false, "fork");
  if (command == 0) become_command(plan);
  g_command = command;
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
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
  result.reserve(strings.size() + 1);
  for (const std::string& text : strings) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

std::vector<std::string> candidates(const SpawnOptions& options) {
  const std::string& program = options.argv.front();
  if (program.find('/') != std::string::npos) return {program};
  std::string path = kDefaultPath;
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

Plan plan_for(const SpawnOptions& options, int report) {
  Plan plan{options.root,
            options.hostname,
            options.uid,
            options.gid,
            options.groups,
            pointers(options.argv),
            pointers(options.env),
            candidates(options),
            {},
            {},
            options.cwd,
            report};
  plan.system.push_back({"/sys", "/sys", true});
  for (const char* name : {"null", "zero", "full", "random", "urandom", "tty"}) {
    const std::string device = std::string("/dev/") + name;
    plan.system.push_back({device, device, false, true});
  }
  for (const Bind& bind : options.binds) {
    const bool is_absolute = bind.target.starts_with('/');
    plan.volumes.push_back({bind.source, is_absolute ? bind.target : "/" + bind.target, bind.read_only});
  }
  return plan;
}

}  // namespace

pid_t spawn_namespaced(const SpawnOptions& options) {
  if (options.argv.empty()) throw Error(Errc::usage, "no command");
  int report[2];
  if (::pipe2(report, O_CLOEXEC) != 0) throw_errno("pipe");
  UniqueFd reader(report[0]);
  UniqueFd writer(report[1]);
  Plan plan = plan_for(options, writer.get());

  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  constexpr unsigned long kFlags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUTS | CLONE_NEWIPC | SIGCHLD;
  const auto child = static_cast<pid_t>(::syscall(SYS_clone, kFlags, nullptr, nullptr, nullptr, nullptr));
  if (child == 0) be_init(plan);
  const int error = errno;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (child < 0) {
    throw Error(Errc::usage, std::string("new namespaces: ") + std::strerror(error) +
                                 (error == EPERM ? " (they need root)" : ""));
  }
  writer.reset();

  Failure failure{};
  ssize_t n = 0;
  do {
    n = ::read(reader.get(), &failure, sizeof failure);
  } while (n < 0 && errno == EINTR);
  if (n == 0) return child;  // closed by exec
  while (::waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  if (failure.of_command) throw std::system_error(failure.error, std::generic_category(), failure.step);
  throw Error(Errc::usage,
              std::string("container root: ") + failure.step + ": " + std::strerror(failure.error));
}

}  // namespace bootseer
