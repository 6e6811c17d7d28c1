"""Sessions on real mounts: what readers see, what the kernel negotiated, and what survives SIGKILL."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.core import errors
from bootseer.native import _core

_HERE = Path(__file__).parent
_DEADLINE_S = 30
_HOWS = ("direct", "buffered", "mmap", "open")
_SIZE = 16 * 1024 * 1024 + 12345


def _missing() -> str | None:
    if os.geteuid() != 0:
        return "mounting needs root"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no /dev/fuse"
    return None


def _kernel() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int(minor.split("-")[0])


pytestmark = pytest.mark.skipif(_missing() is not None, reason=_missing() or "")
needs_6_9 = pytest.mark.skipif(_kernel() < (6, 9), reason="needs Linux 6.9")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll until the condition holds; fail after the deadline."""
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {what}"
        time.sleep(0.01)


class Server:
    """One mount, its serving process, and a duplicate of its /dev/fuse descriptor."""

    def __init__(self, mountpoint: Path, files: dict[str, str], options: dict[str, Any], **spec: Any) -> None:
        self.mountpoint = mountpoint
        self.spec = {"mountpoint": str(mountpoint), "files": files, "options": options, **spec}
        self.device: int | None = None
        self.start()

    def start(self) -> None:
        """Start (or, when a device descriptor is held, restart) the serving process."""
        ours, theirs = socket.socketpair()
        ours.settimeout(_DEADLINE_S)
        spec = {**self.spec, "channel_fd": theirs.fileno(), "resume_fd": self.device}
        inherited = [theirs.fileno()] + ([] if self.device is None else [self.device])
        self.process = subprocess.Popen(
            [sys.executable, str(_HERE / "_session_server.py"), json.dumps(spec)], pass_fds=inherited
        )
        theirs.close()
        self.channel = ours
        line, descriptors, _, _ = socket.recv_fds(ours, 4096, 1)
        assert line, "the server died while starting"
        if self.device is None:
            self.device = descriptors[0]
        else:
            os.close(descriptors[0])

    def ask(self, question: str) -> Any:
        self.channel.sendall(question.encode() + b"\n")
        reply = b""
        while not reply.endswith(b"\n"):
            data = self.channel.recv(65536)
            assert data, "the server died"
            reply += data
        return json.loads(reply)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(_DEADLINE_S)
        self.channel.close()

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.mountpoint)], check=False, stderr=subprocess.DEVNULL)
        if self.device is not None:
            os.close(self.device)
        try:
            self.process.wait(_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            subprocess.run(["umount", "-f", str(self.mountpoint)], check=False, stderr=subprocess.DEVNULL)
            self.process.wait(_DEADLINE_S)
            raise
        finally:
            self.channel.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "data"
    path.write_bytes(os.urandom(_SIZE))
    return path


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder on tmpfs, where the state of a session belongs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
def serve(tmp_path: Path, source: Path) -> Iterator[Callable[..., Server]]:
    """Returns a function that mounts a local file as ``data``."""
    servers: list[Server] = []

    def start(*, options: dict[str, Any] | None = None, data: Path = source, **spec: Any) -> Server:
        mountpoint = tmp_path / f"mount{len(servers)}"
        mountpoint.mkdir()
        merged = {"state_dir": str(tmp_path / f"state{len(servers)}"), **(options or {})}
        server = Server(mountpoint, {"data": str(data)}, merged, **spec)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


Readers = list[subprocess.Popen[str]]


@pytest.fixture
def start_readers(source: Path) -> Iterator[Callable[[Path, tuple[str, ...]], Readers]]:
    """Returns a function that starts one verifying reader for each way of reading."""
    readers: Readers = []

    def start(path: Path, hows: tuple[str, ...]) -> Readers:
        for seed, how in enumerate(hows):
            command = [
                sys.executable,
                str(_HERE / "_verifying_reader.py"),
                str(path),
                str(source),
                how,
                str(seed),
            ]
            readers.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "reading\n"
        return readers

    yield start
    for reader in readers:
        with reader:
            reader.kill()


def finish_readers(readers: Readers) -> list[dict[str, Any]]:
    """Stop the readers and check that none is stuck and none saw a wrong byte or an error."""
    results = []
    for reader in readers:
        output, _ = reader.communicate(timeout=_DEADLINE_S)
        result = json.loads(output.splitlines()[-1])
        assert result["wrong"] == 0
        assert result["failed"] == []
        results.append(result)
    return results


def test_bytes_are_right_for_four_readers(
    serve: Callable[..., Server], source: Path, start_readers: Callable[..., Readers]
) -> None:
    server = serve(options={"passthrough": False})
    assert (server.mountpoint / "data").read_bytes() == source.read_bytes()
    readers = start_readers(server.mountpoint / "data", _HOWS)
    time.sleep(1)
    results = finish_readers(readers)
    assert all(result["reads"] > 20 for result in results)
    statistics = server.ask("statistics")
    assert statistics["read"] == 0  # none reached Python
    assert statistics["reads"] > 80
    assert statistics["reply_failures"] == 0


def test_reads_of_other_files_reach_python(serve: Callable[..., Server]) -> None:
    server = serve(options={"passthrough": False})
    want = bytes(range(256)) * 4096 * 3
    path = server.mountpoint / "from-python"
    assert path.read_bytes() == want
    # One request of 1 MiB, more than one control message holds.
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffer = mmap.mmap(-1, 1 << 20)
    assert os.preadv(descriptor, [buffer], 1 << 20) == 1 << 20
    assert buffer[:] == want[1 << 20 : 2 << 20]
    os.close(descriptor)


def test_reads_past_the_end_and_across_it(serve: Callable[..., Server], source: Path) -> None:
    server = serve(options={"passthrough": False}, direct_io=True)
    descriptor = os.open(server.mountpoint / "data", os.O_RDONLY)
    want = source.read_bytes()
    assert os.pread(descriptor, 1000, _SIZE - 100) == want[-100:]
    assert os.pread(descriptor, 1000, _SIZE) == b""
    assert os.pread(descriptor, 1000, _SIZE + 5000) == b""
    assert os.pread(descriptor, 0, 0) == b""
    os.close(descriptor)


def test_negotiated_values_are_read_back(serve: Callable[..., Server]) -> None:
    server = serve(options={"passthrough": False, "read_ahead_bytes": 2 << 20, "max_background": 77})
    (server.mountpoint / "data").stat()
    wait_until(lambda: "read_ahead_bytes" in server.ask("info"), "the mount is tuned")
    info = server.ask("info")
    assert info["initialized"] is True
    assert info["read_ahead_bytes"] == 2 << 20
    assert info["max_background"] == 77
    assert info["max_read_bytes"] == 1 << 20
    assert info["async_read"] is True
    assert info["fallbacks"]["passthrough"] == "not wanted"
    device = server.mountpoint.stat().st_dev
    bdi = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    assert int(bdi.read_text()) == 2048


def test_one_megabyte_read_is_one_request(serve: Callable[..., Server]) -> None:
    server = serve(options={"passthrough": False})
    descriptor = os.open(server.mountpoint / "data", os.O_RDONLY | os.O_DIRECT)
    before = server.ask("statistics")["reads"]
    os.preadv(descriptor, [mmap.mmap(-1, 1 << 20)], 0)
    assert server.ask("statistics")["reads"] == before + 1
    os.close(descriptor)


def test_a_file_that_shrinks_gives_eio(serve: Callable[..., Server], source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "shrinking"
    copy.write_bytes(source.read_bytes())
    server = serve(options={"passthrough": False}, data=copy, direct_io=True)
    os.truncate(copy, 4096)
    descriptor = os.open(server.mountpoint / "data", os.O_RDONLY)
    assert len(os.pread(descriptor, 4096, 0)) == 4096
    with pytest.raises(OSError, match="Input/output error"):
        os.pread(descriptor, 4096, 8 << 20)
    os.close(descriptor)


def test_registered_files_cannot_be_opened_for_writing(serve: Callable[..., Server]) -> None:
    server = serve(options={"passthrough": False, "read_only": False})
    with pytest.raises(OSError, match="Read-only file system"):
        os.open(server.mountpoint / "data", os.O_RDWR)


def test_removed_file_is_asked_of_python(serve: Callable[..., Server]) -> None:
    server = serve(options={"passthrough": False}, direct_io=True)
    descriptor = os.open(server.mountpoint / "data", os.O_RDONLY)
    assert len(os.pread(descriptor, 4096, 0)) == 4096
    assert server.ask("remove 10") == "removed"
    with pytest.raises(OSError, match="Bad file descriptor"):  # the test operations' answer
        os.pread(descriptor, 4096, 0)
    os.close(descriptor)


@needs_6_9
def test_passthrough_reads_do_not_reach_us(serve: Callable[..., Server], source: Path) -> None:
    server = serve(offer_passthrough=True)
    assert (server.mountpoint / "data").read_bytes() == source.read_bytes()
    info = server.ask("info")
    assert info["passthrough"] is True
    assert "passthrough" not in info["fallbacks"]
    statistics = server.ask("statistics")
    assert statistics["passthrough_opens"] == 1
    assert statistics["reads"] == 0
    wait_until(lambda: bool(server.ask("statistics")["open_nodes"] == 0), "the release arrives")


@needs_6_9
def test_passthrough_opens_of_one_inode_agree(serve: Callable[..., Server], source: Path) -> None:
    server = serve(offer_passthrough=True)
    path = server.mountpoint / "data"
    descriptors = [os.open(path, os.O_RDONLY) for _ in range(3)]
    want = source.read_bytes()
    os.close(descriptors.pop())
    assert all(os.pread(descriptor, 5000, 777) == want[777:5777] for descriptor in descriptors)
    # A removed file keeps its mode while it is open: the kernel would fail a plain open with EIO.
    assert server.ask("remove 10") == "removed"
    descriptors.append(os.open(path, os.O_RDONLY))
    assert os.pread(descriptors[-1], 100, 0) == want[:100]
    for descriptor in descriptors:
        os.close(descriptor)


@needs_6_9
def test_sigkill_with_passthrough(
    serve: Callable[..., Server], start_readers: Callable[..., Readers]
) -> None:
    server = serve(offer_passthrough=True)
    readers = start_readers(server.mountpoint / "data", ("open", "mmap", "open", "buffered"))
    for _ in range(5):
        time.sleep(0.1)
        server.kill()
        server.start()
    finish_readers(readers)
    statistics = server.ask("statistics")
    assert statistics["reads"] == 0
    assert statistics["passthrough_opens"] > 0


@needs_6_9
def test_passthrough_open_survives_the_server(serve: Callable[..., Server], source: Path) -> None:
    server = serve(offer_passthrough=True)
    path = server.mountpoint / "data"
    before = os.open(path, os.O_RDONLY)
    server.kill()
    want = source.read_bytes()
    assert os.pread(before, 4096, 4096) == want[4096:8192]  # no server needed
    server.start()
    after = os.open(path, os.O_RDONLY)  # must get the backing id of the first open
    assert os.pread(after, 4096, 0) == want[:4096]
    os.close(before)
    os.close(after)


def test_no_passthrough_for_a_file_that_is_open_without(serve: Callable[..., Server], source: Path) -> None:
    server = serve(options={"passthrough": False}, offer_passthrough=True)
    assert (server.mountpoint / "data").read_bytes() == source.read_bytes()
    assert server.ask("statistics")["passthrough_opens"] == 0
    assert server.ask("statistics")["reads"] > 0


def _kill_and_resume(server: Server, readers: Readers, kills: int) -> list[dict[str, Any]]:
    for _ in range(kills):
        time.sleep(0.1)
        server.kill()
        server.start()
    wait_until(lambda: server.ask("statistics")["reads"] > 20, "reads go on")
    # Names still resolve, through the new pyfuse3.
    assert [path.name for path in server.mountpoint.iterdir()] == ["data"]
    return finish_readers(readers)


def test_sigkill_twenty_times_under_readers(
    serve: Callable[..., Server], start_readers: Callable[..., Readers]
) -> None:
    server = serve(options={"passthrough": False})
    results = _kill_and_resume(server, start_readers(server.mountpoint / "data", _HOWS), 20)
    assert all(result["reads"] > 20 for result in results)


def test_sigkill_with_the_journal(
    serve: Callable[..., Server], start_readers: Callable[..., Readers], memory_path: Path
) -> None:
    """What kernels before 6.9 get: requests in flight come from the journal, not from the kernel."""
    options = {"passthrough": False, "journal": "always", "state_dir": str(memory_path)}
    server = serve(options=options, slow_files=["data"], slow_s=0.02)
    results = _kill_and_resume(server, start_readers(server.mountpoint / "data", _HOWS), 10)
    assert all(result["reads"] > 5 for result in results)
    info = server.ask("info")
    assert info["journal"] is True


def test_sigkill_with_waiting_reads(
    serve: Callable[..., Server], start_readers: Callable[..., Readers]
) -> None:
    server = serve(options={"passthrough": False}, slow_files=["data"], slow_s=0.02)
    _kill_and_resume(server, start_readers(server.mountpoint / "data", _HOWS), 5)


def test_sigkill_before_anything_was_asked(serve: Callable[..., Server], source: Path) -> None:
    server = serve(options={"passthrough": False})
    for _ in range(5):
        server.kill()
        server.start()
    assert (server.mountpoint / "data").read_bytes() == source.read_bytes()


def test_clean_stop_hands_over(serve: Callable[..., Server], source: Path) -> None:
    server = serve(options={"passthrough": False})
    path = server.mountpoint / "data"
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    server.channel.sendall(b"stop\n")
    assert server.process.wait(_DEADLINE_S) == 0
    server.channel.close()
    reader = subprocess.Popen(
        [sys.executable, "-c", f"open({str(path)!r}, 'rb', buffering=0).read(4096)"]
    )  # waits for the successor
    server.start()
    assert reader.wait(_DEADLINE_S) == 0
    assert os.preadv(descriptor, [mmap.mmap(-1, 4096)], 0) == 4096
    os.close(descriptor)


def test_resume_without_state_is_refused(tmp_path: Path) -> None:
    with Path(os.devnull).open("rb") as device, pytest.raises(errors.NotFoundError):
        _core.Session.resume(device.fileno(), mountpoint=str(tmp_path), state_dir=str(tmp_path / "none"))


def test_resume_with_a_damaged_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "init").write_bytes(b"BSRINIT1" + bytes(100))
    with Path(os.devnull).open("rb") as device, pytest.raises(errors.IntegrityError):
        _core.Session.resume(device.fileno(), mountpoint=str(tmp_path), state_dir=str(tmp_path))


def test_killed_reader_does_not_wait_for_a_slow_file(serve: Callable[..., Server]) -> None:
    server = serve(options={"passthrough": False}, slow_files=["data"], slow_s=3600, direct_io=True)
    path = str(server.mountpoint / "data")
    reader = subprocess.Popen([sys.executable, "-c", f"open({path!r}, 'rb', buffering=0).read(4096)"])
    wait_until(lambda: server.ask("statistics")["parked"] == 1, "the read is parked")
    reader.kill()
    assert reader.wait(_DEADLINE_S) == -signal.SIGKILL
    statistics = server.ask("statistics")
    assert statistics["interrupted_reads"] == 1
    assert statistics["parked"] == 0


def test_harmless_signals_do_not_fail_a_read(serve: Callable[..., Server]) -> None:
    """Go and Python programs get signals all the time; a read of a regular file never returns EINTR."""
    server = serve(options={"passthrough": False}, slow_files=["data"], slow_s=0.5, direct_io=True)
    path = str(server.mountpoint / "data")
    code = (
        "import os, signal, sys, threading\n"
        "signal.signal(signal.SIGUSR1, lambda *_: None)\n"
        "timer = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))\n"
        f"fd = os.open({path!r}, os.O_RDONLY)\n"
        "timer.start()\n"
        "print(len(os.pread(fd, 4096, 0)))\n"
    )
    output = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=_DEADLINE_S)
    assert output == "4096\n"
    statistics = server.ask("statistics")
    assert statistics["interrupts"] >= 1
    assert statistics["interrupted_reads"] == 0


def test_unmount_ends_the_session(serve: Callable[..., Server]) -> None:
    server = serve(options={"passthrough": False})
    (server.mountpoint / "data").stat()
    subprocess.run(["umount", str(server.mountpoint)], check=True)
    assert server.process.wait(_DEADLINE_S) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 0},
        {"max_read_bytes": 1000},
        {"max_read_bytes": 2 << 20},
        {"max_background": 0},
        {"fsname": "a,allow_other"},
        {"journal": "always", "state_dir": None},
        {"journal": "sometimes"},
    ],
)
def test_impossible_options_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(errors.UsageError):
        _core.Session.mount(str(tmp_path), **options)


def test_mount_on_nothing_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        _core.Session.mount(str(tmp_path / "missing"))


def test_local_file_must_be_a_regular_file(tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError):
        _core.LocalFile(str(tmp_path))
    with contextlib.suppress(FileNotFoundError):
        _core.LocalFile(str(tmp_path / "missing"))
        pytest.fail("opened a missing file")
