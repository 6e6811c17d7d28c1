"""The client against a daemon that answers everything a socket can answer."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from tests.cli.conftest import FakeDaemon, make_mount, make_status

from bootseer.cli.client import Client
from bootseer.core import errors, wire


def test_records_arrive(fake: FakeDaemon) -> None:
    client = Client(fake.socket_path)
    status = make_status(mounts=[make_mount()], fallbacks={"loop": 2})
    fake.answer("GET status", 200, status)
    fake.answer("GET mounts", 200, [make_mount()])
    fake.answer("GET mounts/abc123/statistics", 200, {"file.hits": 3})
    assert client.status() == status
    assert client.mounts() == [make_mount()]
    assert client.statistics("abc123") == {"file.hits": 3}


def test_what_is_asked(fake: FakeDaemon) -> None:
    client = Client(fake.socket_path)
    fake.answer("POST mounts", 201, make_mount())
    fake.answer("DELETE mounts/abc123?lazy=1", 200, make_mount(state="unmounted"))
    fake.answer("POST mounts/a%2Fb%3Fc/ready", 200, make_mount())
    request = wire.MountRequest(image="/x", prefetch=False, label="label")
    client.mount(request)
    assert client.unmount("abc123", lazy=True).state == "unmounted"
    client.tell("a/b?c", "ready")
    assert wire.decode(fake.requests[0][1], wire.MountRequest) == request


@pytest.mark.parametrize(
    "kind",
    [errors.NotFoundError, errors.IntegrityError, errors.BackendUnavailableError, errors.ConfigError],
)
def test_errors_come_back_as_they_were(fake: FakeDaemon, kind: type[errors.BootseerError]) -> None:
    fake.answer("GET mounts", 500, wire.ErrorBody.of(kind("a message", hint="a hint")))
    with pytest.raises(kind) as raised:
        Client(fake.socket_path).mounts()
    assert (raised.value.message, raised.value.hint) == ("a message", "a hint")


def test_an_error_of_a_newer_daemon(fake: FakeDaemon) -> None:
    fake.answer("GET mounts", 500, wire.ErrorBody("unheard_of", "a message"))
    with pytest.raises(errors.BootseerError, match="a message"):
        Client(fake.socket_path).mounts()


def test_fields_of_a_newer_daemon_are_ignored(fake: FakeDaemon) -> None:
    fake.answer("GET mounts", 200, [{**wire.decode(wire.encode(make_mount()), dict), "new": 1}])
    assert Client(fake.socket_path).mounts() == [make_mount()]


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, b"<html>"), (200, b"[1, 2]"), (200, b'[{"id": "x"}]'), (500, b"oops"), (500, b"{}"), (200, b"")],
)
def test_somebody_else_answers(fake: FakeDaemon, status: int, body: bytes) -> None:
    fake.answer("GET mounts", status, body)
    with pytest.raises(errors.DaemonUnreachableError, match="no bootseerd of this version"):
        Client(fake.socket_path).mounts()


@pytest.mark.parametrize(
    "answer", [b"", b"garbage\r\n\r\n", b"HTTP/1.1 200 X\r\nContent-Length: 500\r\n\r\n[", b"\0" * 70000]
)
def test_broken_answers(fake: FakeDaemon, answer: bytes) -> None:
    fake.answers["GET mounts"] = answer
    with pytest.raises(errors.DaemonUnreachableError) as raised:
        Client(fake.socket_path).mounts()
    assert str(fake.socket_path) in raised.value.message


def test_silence_ends(fake: FakeDaemon) -> None:
    release = threading.Event()

    def say_nothing(_connection: socket.socket) -> None:
        release.wait(20)

    fake.answers["GET mounts"] = say_nothing
    with pytest.raises(errors.TimeoutExpiredError, match=r"did not answer in 0\.2 s"):
        Client(fake.socket_path, timeout_s=0.2).mounts()
    release.set()


def test_no_socket(tmp_path: Path) -> None:
    with pytest.raises(errors.DaemonUnreachableError, match="No such file") as raised:
        Client(tmp_path / "nothing.sock").status()
    assert raised.value.hint is not None
    assert "start bootseerd" in raised.value.hint


def test_a_dead_socket(tmp_path: Path) -> None:
    path = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    with pytest.raises(errors.DaemonUnreachableError, match="refused"):
        Client(path).status()
    with pytest.raises(errors.DaemonUnreachableError, match="too long"):
        Client(tmp_path / ("x" * 200)).status()
