#include "bootseer/namespaces.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "bootseer/error.hpp"
#include "bootseer/fd.hpp"
#include "temp_dir.hpp"

namespace bootseer {
namespace {

using test::TempDir;

std::string read_text(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

class Namespaces : public ::testing::Test {
 protected:
  // A root with the host's shell in it.
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root";
    std::filesystem::create_directories(root() + "/bin");
    std::filesystem::create_directories(directory.path("out"));
    const std::string command =
        "cd '" + root() +
        "' && cp -L /bin/sh bin/sh && for library in $(ldd /bin/sh | grep -o '/[^ )]*'); do"
        " mkdir -p .$(dirname $library) && cp -L $library .$library; done";
    ASSERT_EQ(std::system(command.c_str()), 0);
    options.root = root();
    options.env = {"PATH=/bin"};
    options.binds = {{directory.path("out"), "/out", false}};
  }

  std::string root() const { return directory.path("root"); }
  std::string out(const std::string& name) const { return read_text(directory.path("out/" + name)); }

  int run(const std::string& script) {
    options.argv = {"sh", "-c", script};
    return wait(spawn_namespaced(options));
  }

  static int wait(pid_t pid) {
    int status = 0;
    EXPECT_EQ(::waitpid(pid, &status, 0), pid);
    EXPECT_TRUE(WIFEXITED(status));
    return WEXITSTATUS(status);
  }

  int exec_error() {
    try {
      wait(spawn_namespaced(options));
    } catch (const std::system_error& error) {
      return error.code().value();
    }
    return 0;
  }

  TempDir directory;
  SpawnOptions options;
};

TEST_F(Namespaces, ExitCodesAndSignals) {
  EXPECT_EQ(run("exit 0"), 0);
  EXPECT_EQ(run("exit 77"), 77);
  EXPECT_EQ(run("kill -9 $$"), 128 + SIGKILL);
}

TEST_F(Namespaces, ArgumentsEnvironmentAndDirectory) {
  options.env = {"PATH=/bin", "EMPTY=", "VALUE=a b=c"};
  options.cwd = "/out";
  options.argv = {"/bin/sh", "-c", "echo \"$0|$1|$EMPTY|$VALUE|${HOME-unset}|$PWD\" > result", "zero",
                  "one two"};
  EXPECT_EQ(wait(spawn_namespaced(options)), 0);
  EXPECT_EQ(out("result"), "zero|one two||a b=c|unset|/out\n");
}

TEST_F(Namespaces, TheCommandIsAloneAndHasAHostName) {
  options.hostname = "trainer";
  EXPECT_EQ(run("read name < /proc/sys/kernel/hostname; echo $name $$ > /out/result; echo /proc/[0-9]* > "
                "/out/pids"),
            0);
  EXPECT_EQ(out("result"), "trainer 2\n");
  EXPECT_EQ(out("pids"), "/proc/1 /proc/2\n");
}

TEST_F(Namespaces, DevicesAndStandardStreams) {
  EXPECT_EQ(run("test -c /dev/null && test -c /dev/zero && test -c /dev/urandom && test -d /dev/shm"), 0);
  EXPECT_EQ(run("echo text | { read word < /dev/stdin; echo $word > /out/result; }"), 0);
  EXPECT_EQ(out("result"), "text\n");
  EXPECT_EQ(run("test -e /dev/fd/0 && test -L /dev/stdout && test -L /dev/stderr && test -L /dev/ptmx"), 0);
  EXPECT_NE(run("echo x 2>/dev/null > /sys/bootseer"), 0);
}

TEST_F(Namespaces, UserAndGroup) {
  options.uid = 1234;
  options.gid = 4321;
  options.groups = {50, 10};
  EXPECT_EQ(::chmod(directory.path("out").c_str(), 0777), 0);
  ASSERT_EQ(run("while read name value rest; do case $name in Uid:|Gid:|Groups:) echo $name $value $rest; "
                "esac; done"
                " < /proc/self/status > /out/result"),
            0);
  EXPECT_EQ(out("result"), "Uid: 1234 1234 1234 1234\nGid: 4321 4321 4321 4321\nGroups: 10 50\n");
}

TEST_F(Namespaces, BindsAreReadOnlyWhenAsked) {
  std::filesystem::create_directory(directory.path("data"));
  directory.write("data/file", "given\n");
  directory.write("single", "one file\n");
  options.binds.push_back({directory.path("data"), "/new/deep/data", true});
  options.binds.push_back({directory.path("single"), "/etc/single", true});
  EXPECT_EQ(run("read a < /new/deep/data/file; read b < /etc/single; echo $a $b > /out/result"), 0);
  EXPECT_EQ(out("result"), "given one file\n");
  EXPECT_NE(run("echo x > /new/deep/data/file"), 0);
  EXPECT_NE(run("echo x > /etc/single"), 0);
  EXPECT_EQ(read_text(directory.path("data/file")), "given\n");
  EXPECT_EQ(read_text(directory.path("single")), "one file\n");
}

TEST_F(Namespaces, ABindMayLieInAnother) {
  std::filesystem::create_directory(directory.path("inner"));
  directory.write("inner/file", "inner\n");
  options.binds.push_back({directory.path("inner"), "/out/sub", true});
  EXPECT_EQ(run("read a < /out/sub/file; echo $a > /out/result"), 0);
  EXPECT_EQ(out("result"), "inner\n");
}

// An image is not trusted with the host's files.
TEST_F(Namespaces, SymbolicLinksOfTheImageStayInside) {
  std::filesystem::create_directory(directory.path("host"));
  std::filesystem::create_directory_symlink(directory.path("host"), root() + "/link");
  std::filesystem::create_directory_symlink("../../../../../../" + directory.path("host"), root() + "/up");
  for (const char* name : {"/proc", "/sys", "/dev"}) {
    std::filesystem::create_directory_symlink(directory.path("host") + name, root() + name);
    std::filesystem::create_directories(root() + directory.path("host") + name);
  }
  options.binds.push_back({directory.path("out"), "/link/one", false});
  options.binds.push_back({directory.path("out"), "/up/two", false});
  options.cwd = "/link/three";
  EXPECT_EQ(run("echo done > /link/one/result"), 0);
  EXPECT_EQ(out("result"), "done\n");
  EXPECT_TRUE(std::filesystem::is_empty(directory.path("host")));
}

TEST_F(Namespaces, ADanglingTargetIsRefused) {
  std::filesystem::create_symlink(directory.path("made"), root() + "/dangling");
  options.binds.push_back({directory.path("out"), "/dangling", false});
  EXPECT_THROW(run("exit 0"), Error);
  EXPECT_FALSE(std::filesystem::exists(directory.path("made")));
}

TEST_F(Namespaces, AMissingSourceIsRefused) {
  options.binds.push_back({directory.path("missing"), "/data", false});
  EXPECT_THROW(run("exit 0"), Error);
}

TEST_F(Namespaces, WorkingDirectories) {
  options.cwd = "/new/place";
  EXPECT_EQ(run("echo $PWD > /out/result"), 0);
  EXPECT_EQ(out("result"), "/new/place\n");
  options.cwd = "/bin/sh";
  options.argv = {"sh"};
  EXPECT_EQ(exec_error(), ENOTDIR);
}

TEST_F(Namespaces, ProgramsThatCannotRun) {
  options.argv = {"missing"};
  EXPECT_EQ(exec_error(), ENOENT);
  options.argv = {"/bin/missing"};
  EXPECT_EQ(exec_error(), ENOENT);
  options.argv = {"/bin"};
  EXPECT_EQ(exec_error(), EACCES);
  directory.write("root/bin/plain", "#!/bin/sh\n");
  ASSERT_EQ(::chmod((root() + "/bin/plain").c_str(), 0644), 0);
  options.argv = {"plain"};
  EXPECT_EQ(exec_error(), EACCES);
  directory.write("root/bin/garbage",
                  "\x7f"
                  "ELF garbage");
  ASSERT_EQ(::chmod((root() + "/bin/garbage").c_str(), 0755), 0);
  options.argv = {"garbage"};
  EXPECT_EQ(exec_error(), ENOEXEC);
  options.argv = {};
  EXPECT_THROW(spawn_namespaced(options), Error);
}

TEST_F(Namespaces, TheFirstProgramAlongThePathRuns) {
  for (const char* name : {"first", "second"}) {
    std::filesystem::create_directory(root() + "/" + name);
    directory.write("root/" + std::string(name) + "/tool",
                    "#!/bin/sh\necho " + std::string(name) + " > /out/result\n");
    ASSERT_EQ(::chmod((root() + "/" + name + "/tool").c_str(), 0755), 0);
  }
  options.env = {"PATH=/nowhere::/first:/second"};
  options.argv = {"tool"};
  EXPECT_EQ(wait(spawn_namespaced(options)), 0);
  EXPECT_EQ(out("result"), "first\n");
}

TEST_F(Namespaces, SignalsReachTheCommand) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer holds signals back in a child made by clone(2) alone";
#endif
  ASSERT_EQ(::mkfifo(directory.path("out/ready").c_str(), 0600), 0);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    options.argv = {"sh", "-c",
                    "trap 'exit 42' INT TERM HUP QUIT; echo ready > /out/ready; while :; do read x; done"};
    int idle[2];
    ASSERT_EQ(::pipe2(idle, O_CLOEXEC), 0);
    const UniqueFd writer(idle[1]);
    const UniqueFd reader(idle[0]);
    const UniqueFd saved(::dup(0));
    ::dup2(reader.get(), 0);
    const pid_t pid = spawn_namespaced(options);
    ::dup2(saved.get(), 0);
    EXPECT_EQ(read_text(directory.path("out/ready")), "ready\n");
    EXPECT_EQ(::kill(pid, number), 0);
    EXPECT_EQ(wait(pid), 42) << number;
  }
}

TEST_F(Namespaces, TheCommandTakesItsChildrenAlong) {
  EXPECT_EQ(run("while :; do :; done & while :; do :; done & exit 3"), 3);
}

TEST_F(Namespaces, OrphansAreReaped) {
  // The inner shell ends before its child does: init inherits it.
  EXPECT_EQ(run("sh -c 'sh -c : &'; sh -c 'sh -c : &'; exit 5"), 5);
}

TEST_F(Namespaces, IgnoredSignalsAreNotInherited) {
  const auto before_child = ::signal(SIGCHLD, SIG_IGN);
  const auto before_term = ::signal(SIGTERM, SIG_IGN);
  options.argv = {"sh", "-c", "sh -c 'exit 9'; code=$?; kill -TERM $$; exit $code"};
  const pid_t pid = spawn_namespaced(options);
  ::signal(SIGCHLD, before_child);
  ::signal(SIGTERM, before_term);
  EXPECT_EQ(wait(pid), 128 + SIGTERM);
}

TEST_F(Namespaces, NothingStaysMounted) {
  EXPECT_EQ(run("exit 0"), 0);
  options.argv = {"missing"};
  EXPECT_EQ(exec_error(), ENOENT);
  EXPECT_EQ(read_text("/proc/self/mountinfo").find(directory.path()), std::string::npos);
}

}  // namespace
}  // namespace bootseer
