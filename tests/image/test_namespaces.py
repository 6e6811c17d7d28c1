"""Commands in a root of their own, by namespaces alone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.image._trees import write

from bootseer import native
from bootseer.core.errors import UsageError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

ENV = {"PATH": "/usr/bin:/usr/sbin"}
HOST = [("/usr", "/usr", True), ("/etc/ld.so.cache", "/etc/ld.so.cache", True)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root file system whose programs are the host's."""
    path = tmp_path / "root"
    for name in ("bin", "sbin", "lib", "lib64"):
        write(path / "etc/hostname")
        (path / name).symlink_to(f"usr/{name}")
    return path


def spawn(
    root: Path,
    *argv: str,
    cwd: str = "/",
    binds: Sequence[tuple[str, str, bool]] = (),
    env: Mapping[str, str] = ENV,
    uid: int = 0,
    gid: int = 0,
) -> int:
    return native.spawn_namespaced(
        str(root), argv, env, cwd, binds=[*HOST, *binds], hostname="inside", uid=uid, gid=gid
    )


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run(root: Path, script: str, **options: object) -> str:
    """The output of a shell script, by a file in the root."""
    code = wait(spawn(root, "sh", "-c", f"exec >>/output 2>&1; {script}", **options))  # type: ignore[arg-type]
    output = (root / "output").read_text()
    assert code == 0, output
    return output


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.005)


def test_what_the_command_sees(root: Path) -> None:
    script = """
        hostname; pwd; echo $PATH $X; echo $(id -u) $(id -g) $(id -G); stat -c %a /dev/shm
        head -c 3 /dev/zero | od -An -tx1; echo x >/dev/null
        touch /sys/x 2>/dev/null || echo read-only
        tr '\\0' ' ' </proc/1/cmdline | grep -q . && echo proc
        bash -c 'cat <(echo substitution)'
    """
    output = run(root, script, cwd="/made/here", env={**ENV, "X": "value"})
    assert output.splitlines() == [
        *("inside", "/made/here", "/usr/bin:/usr/sbin value", "0 0 0", "1777"),
        *(" 00 00 00", "read-only", "proc", "substitution"),
    ]
    assert {"dev", "proc", "sys"} <= {path.name for path in root.iterdir()}


def test_nothing_of_it_shows_outside(root: Path) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    name = os.uname().nodename
    run(root, "mount -t tmpfs none /etc")
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert os.uname().nodename == name


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 128 + 9)])
def test_exit_codes(root: Path, script: str, code: int) -> None:
    assert wait(spawn(root, "sh", "-c", script)) == code


def test_a_user(root: Path) -> None:
    (root / "etc").chmod(0o777)
    pid = spawn(root, "sh", "-c", 'echo "$(id -u) $(id -g) $(id -G)" >/etc/ids', uid=1000, gid=1001)
    assert wait(pid) == 0
    assert (root / "etc/ids").read_text() == "1000 1001 1001\n"


def test_a_user_from_a_process_with_threads(root: Path) -> None:
    """glibc's setuid() would wait for the threads of the parent, which the child does not have."""
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            assert wait(spawn(root, "true", uid=1000, gid=1000)) == 0
    finally:
        stop.set()


def test_what_cannot_be_executed(root: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        spawn(root, "no-such-program")
    write(root / "plain").chmod(0o644)
    with pytest.raises(PermissionError, match="/plain"):
        spawn(root, "/plain")
    write(root / "text", b"no magic").chmod(0o755)
    with pytest.raises(OSError, match="Exec format error"):
        spawn(root, "/text")
    with pytest.raises(NotADirectoryError, match="working directory"):
        spawn(root, "true", cwd="/plain/x")


def test_what_cannot_be_set_up(root: Path, tmp_path: Path) -> None:
    """Not an error of the command: nobody may take it for "not found in the image"."""
    with pytest.raises(UsageError, match=r"open /no/such/source: No such file"):
        spawn(root, "true", binds=[("/no/such/source", "/x", False)])
    with pytest.raises(UsageError, match="missing: No such file"):
        spawn(tmp_path / "missing", "true")
    with pytest.raises(UsageError, match="bind /etc/hostname"):
        spawn(root, "true", binds=[("/usr", "/etc/hostname", False)])


def test_binds(root: Path, tmp_path: Path) -> None:
    write(tmp_path / "data/file", b"data")
    write(tmp_path / "single", b"single")
    binds = [
        (str(tmp_path / "data"), "/deep/in/here", False),
        (str(tmp_path / "data"), "/fixed", True),
        (str(tmp_path / "single"), "/deep/single", True),
    ]
    output = run(
        root,
        "cat /deep/in/here/file /fixed/file /deep/single; touch /deep/in/here/new;"
        "touch /fixed/new 2>/dev/null || echo -n ro; echo 2>/dev/null >/deep/single || echo -n ro",
        binds=binds,
    )
    assert output == "datadatasinglero" + "ro"
    assert (tmp_path / "data/new").exists()


def test_links_of_the_image_lead_nowhere_outside(root: Path, tmp_path: Path) -> None:
    """An image's ``/data -> /outside`` must not make the host's ``/outside`` the target of a mount."""
    outside = tmp_path / "outside"
    outside.mkdir()
    write(tmp_path / "data/file", b"data")
    (root / "data").symlink_to(outside)
    for name in ("dev", "proc", "sys"):
        (root / name).symlink_to(outside)
    (root / str(outside)[1:]).mkdir(parents=True)  # what the link means inside
    with pytest.raises(UsageError):  # /proc, /sys and /dev at one place are no root
        spawn(root, "true", binds=[(str(tmp_path / "data"), "/data/x/y", False)])
    for name in ("dev", "proc", "sys"):
        (root / name).unlink()
    assert run(root, "cat /data/x/y/file", binds=[(str(tmp_path / "data"), "/data/x/y", False)]) == "data"
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_signals_reach_the_command(root: Path, number: signal.Signals) -> None:
    pid = spawn(
        root, "sh", "-c", f"trap 'exit 9' {number.name[3:]}; touch /ready; while :; do sleep 0.05; done"
    )
    wait_for(root / "ready")
    os.kill(pid, number)
    assert wait(pid) == 9


def test_a_command_that_ignores_nothing_dies_of_a_signal(root: Path) -> None:
    pid = spawn(root, "sh", "-c", "touch /ready; exec sleep 100")
    wait_for(root / "ready")
    os.kill(pid, signal.SIGTERM)
    assert wait(pid) == 128 + signal.SIGTERM


def test_the_interpreters_signal_setup_stays_outside(root: Path) -> None:
    """Python ignores SIGPIPE and handles SIGINT; a command inherits neither, nor a mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        output = run(root, "cat /proc/self/status")
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == {*before, signal.SIGUSR1}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    fields = dict(line.split(":\t") for line in output.splitlines())
    assert [fields[name] for name in ("SigBlk", "SigIgn", "SigCgt")] == ["0" * 16] * 3


def test_orphans_end_with_the_command(root: Path) -> None:
    os.mkfifo(root / "fifo")
    reader = os.open(root / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert wait(spawn(root, "sh", "-c", "exec 3>/fifo; echo started >&3; sleep 100 & exit 0")) == 0
        assert os.read(reader, 100) == b"started\n"
        assert os.read(reader, 100) == b""  # nobody holds the other end any more
    finally:
        os.close(reader)


def test_no_command(root: Path) -> None:
    with pytest.raises(UsageError, match="no command"):
        spawn(root)
