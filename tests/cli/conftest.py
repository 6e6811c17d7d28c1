"""The CLI, in this process or in one of its own; a daemon that answers what a test wants; an image with a shell."""

from __future__ import annotations

import gc
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests._node import Node
from tests._rootfs import make_rootfs
from tests.conftest import shared_daemon

from bootseer.cli import app
from bootseer.core import wire
from bootseer.image.convert import convert


@dataclass(frozen=True)
class Outcome:
    """What a verb did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as one document."""
        return json.loads(self.out)

    def one_line(self) -> str:
        """Standard error, which must be exactly one line of ours."""
        assert self.err.startswith("bootseer: "), self.err
        assert self.err.count("\n") == 1, self.err
        assert self.err.endswith("\n"), self.err
        return self.err.removeprefix("bootseer: ").strip()


Bootseer = Callable[..., Outcome]


@pytest.fixture
def bootseer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bootseer:
    """Run a verb in this process."""

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["bootseer", *map(str, arguments)])
        try:
            with pytest.raises(SystemExit) as exited:
                app.main()
        finally:
            gc.enable()
        captured = capsys.readouterr()
        assert isinstance(exited.value.code, int)
        return Outcome(exited.value.code, captured.out, captured.err)

    return run


def command(*arguments: object) -> list[str]:
    """The command line of a verb in a process of its own."""
    return [sys.executable, "-m", "bootseer.cli.app", *map(str, arguments)]


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start a verb in a process of its own."""
    return subprocess.Popen(
        command(*arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 60.0) -> Outcome:
    """Its end."""
    with process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    assert "Traceback" not in err, err
    return Outcome(process.returncode, out, err)


# -- a daemon that answers what a test wants -----------------------------------------------------------------------


@dataclass
class FakeDaemon:
    """Answers each request with the whole ``answers[method + path]``, or with what that makes of the socket."""

    socket_path: Path
    answers: dict[str, bytes | Callable[[socket.socket], None]] = field(default_factory=dict)
    requests: list[tuple[str, bytes]] = field(default_factory=list)

    def answer(self, request: str, status: int, body: object) -> None:
        """Set one."""
        data = body if isinstance(body, bytes) else wire.encode(body)
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        self.answers[request] = head.encode() + data

    def serve(self, listener: socket.socket) -> None:
        """Until the listener is shut down."""
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                self._serve_one(connection)

    def _serve_one(self, connection: socket.socket) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            data += connection.recv(65536)
        head, _, body = data.partition(b"\r\n\r\n")
        lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
        wanted = int(lengths[0].split(b":")[1]) if lengths else 0
        while len(body) < wanted:
            body += connection.recv(65536)
        method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
        request = f"{method} {path.removeprefix('/v1/')}"
        self.requests.append((request, body))
        reply = self.answers.get(request)
        if reply is None:
            failure = wire.encode(wire.ErrorBody("not_found", f"no answer to {request} was planned"))
            reply = f"HTTP/1.1 404 X\r\nContent-Length: {len(failure)}\r\n\r\n".encode() + failure
        if callable(reply):
            reply(connection)
        else:
            connection.sendall(reply)


@pytest.fixture
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDaemon]:
    """A daemon on a socket of its own."""
    daemon = FakeDaemon(tmp_path_factory.mktemp("fake") / "d.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(daemon.socket_path))
        listener.listen(16)
        thread = threading.Thread(target=daemon.serve, args=(listener,), daemon=True)
        thread.start()
        yield daemon
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        assert not thread.is_alive()


def make_mount(**changes: Any) -> wire.Mount:
    """A mount record."""
    values: dict[str, Any] = {
        "id": "abc123",
        "image": "/images/app",
        "digest": "sha256:" + "a" * 64,
        "state": "ready",
        "fuse_mountpoint": "/run/x/mounts/abc123/fuse",
        "image_path": "/run/x/mounts/abc123/fuse/image.erofs",
        "worker_pid": 42,
        "restarts": 0,
        "created_unix_s": 1.0,
        "config": {},
        "trace_path": "",
    }
    return wire.Mount(**values | changes)


def make_status(**changes: Any) -> wire.Status:
    """A status record."""
    values: dict[str, Any] = {
        "version": "0.1.0",
        "api_version": "v1",
        "pid": 7,
        "uptime_s": 3.0,
        "kernel": "6.18.0",
        "spare_ready": True,
        "mounts": [],
        "fallbacks": {},
        "state_dir": "/var/lib/nowhere",
        "run_dir": "/run/nowhere",
    }
    return wire.Status(**values | changes)


# -- a real node and an image with a shell -------------------------------------------------------------------------


@pytest.fixture(scope="session")
def shell_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An OCI layout with a converted root file system."""
    directory = tmp_path_factory.mktemp("shell")
    convert(make_rootfs(directory / "root"), directory / "layout")
    return directory / "layout"


@pytest.fixture(scope="module")
def module_node() -> Iterator[Node]:
    """One daemon for the tests of a module."""
    with shared_daemon() as node:
        yield node


@pytest.fixture
def daemon(
    module_node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    """The daemon of the module, which has no mounts before and after a test; temporary files are checked, too."""
    tmp_path_factory.getbasetemp()  # pytest's own directory is not to be below ours
    temporary = module_node.root / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("BOOTSEER_SOCKET", str(module_node.socket_path))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    try:
        yield module_node
        assert module_node.client.mounts() == []
        assert list(temporary.iterdir()) == []
        assert module_node.mounts() == []
    finally:
        shutil.rmtree(temporary)
