"""The API's socket under clients that behave badly. After each of them the daemon still answers."""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pytest
from tests._node import Node

from bootseer.core import wire

TIMEOUT_S = 20.0


def connect(node: Node) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(TIMEOUT_S)
    connection.connect(str(node.socket_path))
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Until the daemon closes."""
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


def read_answer(file: Any) -> tuple[int, dict[str, str], bytes]:
    """One answer from a connection that stays open."""
    status = int(file.readline().split()[1])
    headers = {}
    while (line := file.readline().strip()) != b"":
        name, _, value = line.partition(b": ")
        headers[name.decode().lower()] = value.decode()
    return status, headers, file.read(int(headers.get("content-length", 0)))


def ask(node: Node, raw: bytes) -> tuple[int, wire.ErrorBody]:
    """Send bytes, expect an error with a body of ours."""
    with connect(node) as connection, connection.makefile("rb") as file:
        connection.sendall(raw)
        status, headers, body = read_answer(file)
        assert headers["content-type"] == "application/json"
        return status, wire.decode(body, wire.ErrorBody)


def request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def test_the_socket_is_for_its_owner_only(api: Node) -> None:
    mode = api.socket_path.stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


def test_another_user_is_turned_away(api: Node) -> None:
    # The modes of files are out of the way, so SO_PEERCRED decides.
    script = """
import os, socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
os.setuid(65534)
connection.connect(sys.argv[1])
try:
    connection.sendall(b"GET /v1/status HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")
    print(len(connection.recv(100)))
except ConnectionError:
    print(0)
"""
    api.root.chmod(0o755)
    api.run_dir.chmod(0o755)
    argv = [sys.executable, "-c", script, str(api.socket_path)]
    api.socket_path.chmod(0o666)
    try:
        result = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        assert result.stdout == "0\n"
    finally:
        api.socket_path.chmod(0o600)
    result = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert "PermissionError" in result.stderr


def test_two_requests_on_one_connection(api: Node) -> None:
    with connect(api) as connection, connection.makefile("rb") as file:
        for _ in range(2):
            connection.sendall(request("GET", "/v1/status"))
            status, _, body = read_answer(file)
            assert status == 200
            assert wire.decode(body, wire.Status).api_version == "v1"


def test_requests_sent_before_the_first_is_answered(api: Node) -> None:
    with connect(api) as connection, connection.makefile("rb") as file:
        connection.sendall(request("GET", "/v1/mounts") * 5)
        assert [read_answer(file)[::2] for _ in range(5)] == [(200, b"[]\n")] * 5


def test_http_1_0_and_connection_close(api: Node) -> None:
    for raw in (b"GET /v1/mounts HTTP/1.0\r\n\r\n", request("GET", "/v1/mounts", Connection="close")):
        with connect(api) as connection:
            connection.sendall(raw)
            assert read_all(connection).endswith(b"\r\n\r\n[]\n")


def test_a_request_in_single_bytes(api: Node) -> None:
    with connect(api) as connection, connection.makefile("rb") as file:
        for byte in request("POST", "/v1/mounts", b"{}"):
            connection.sendall(bytes([byte]))
        assert read_answer(file)[0] == 400


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (request("GET", "/"), 404, "not_found"),
        (request("GET", "/v2/status"), 404, "not_found"),
        (request("GET", "/v1"), 404, "not_found"),
        (request("GET", "/v1/mounts/x/y/z"), 404, "not_found"),
        (request("GET", "/v1/../etc/passwd"), 404, "not_found"),
        (request("GET", "/v1/mounts/nonsense"), 404, "not_found"),
        (request("GET", "/v1/mounts/%00"), 404, "not_found"),
        (request("GET", "/v1/mounts/nonsense/statistics"), 404, "not_found"),
        (request("DELETE", "/v1/mounts/nonsense?lazy=1"), 404, "not_found"),
        (request("POST", "/v1/mounts/nonsense/ready"), 404, "not_found"),
        (request("POST", "/v1/status"), 405, "method"),
        (request("PUT", "/v1/mounts", b"{}"), 405, "method"),
        (request("DELETE", "/v1/mounts"), 405, "method"),
        (request("GET", "/v1/mounts/nonsense/ready"), 405, "method"),
        (request("BREW", "/v1/status"), 405, "method"),
        (request("POST", "/v1/mounts"), 400, "usage"),
        (request("POST", "/v1/mounts", b"{"), 400, "usage"),
        (request("POST", "/v1/mounts", b"[]"), 400, "usage"),
        (request("POST", "/v1/mounts", b"\xff\xfe"), 400, "usage"),
        (request("POST", "/v1/mounts", b'{"image": 7}'), 400, "usage"),
        (request("POST", "/v1/mounts", b"[" * 100_000), 400, "usage"),
        (request("POST", "/v1/mounts", b'{"image": "/nonsense"}'), 404, "not_found"),
        (request("POST", "/v1/mounts", b'{"image": "/non\\u0000sense"}'), 400, "usage"),
        (request("POST", "/v1/mounts", b'{"image": ""}'), 400, "usage"),
        (request("POST", "/v1/mounts", b" " * ((1 << 20) + 1)), 413, "usage"),
        (request("GET", "//["), 400, "usage"),
        (b"GET /v1/status HTTP/1.1\r\n\r\n", 400, "usage"),  # no Host
        (b"garbage\r\n\r\n", 400, "usage"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "usage"),  # TLS
        (b"GET /" + b"a" * 100_000, 431, "usage"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: many\r\n\r\n", 400, "usage"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400, "usage"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "usage"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: magic\r\n\r\n", 501, "usage"),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 404, "not_found"),
    ],
    ids=lambda value: repr(value[:50]) if isinstance(value, bytes) else None,
)
def test_a_bad_request(api: Node, raw: bytes, status: int, code: str) -> None:
    got, body = ask(api, raw)
    assert (got, body.code) == (status, code), body
    assert body.message
    assert "\n" not in body.message


def test_head_has_no_body(api: Node) -> None:
    with connect(api) as connection:
        connection.sendall(request("HEAD", "/v1/status"))
        answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 405 ")
        assert answer.endswith(b"\r\n\r\n")


def test_a_client_that_waits_for_100_continue(api: Node) -> None:
    with connect(api) as connection, connection.makefile("rb") as file:
        head = request("POST", "/v1/mounts", b"{}", Expect="100-continue")[:-2]
        connection.sendall(head)
        assert file.readline().split()[1] == b"100"
        while file.readline().strip():
            pass
        connection.sendall(b"{}")
        assert read_answer(file)[0] == 400


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"G",
        b"GET /v1/status HTTP/1.1\r\nHost",
        request("POST", "/v1/mounts", b"{}")[:-1],
        request("GET", "/v1/status") * 200,  # answers that nobody reads
        b"garbage\r\n\r\n" * 1000,
        os.urandom(5000),
    ],
    ids=lambda raw: repr(raw[:20]),
)
def test_a_client_that_goes_away(api: Node, raw: bytes, reset: bool) -> None:
    with connect(api) as connection:
        try:
            connection.sendall(raw)
        except (BrokenPipeError, ConnectionResetError):
            return  # turned away before it had said all
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert api.client.status().mounts == []


def test_half_closed_after_the_request(api: Node) -> None:
    with connect(api) as connection:
        connection.sendall(request("GET", "/v1/mounts"))
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection).endswith(b"[]\n")


def test_many_clients_that_say_nothing(api: Node) -> None:
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connect(api))
        assert api.client.status().mounts == []


def test_status_says_what_the_node_is(api: Node) -> None:
    with connect(api) as connection, connection.makefile("rb") as file:
        connection.sendall(request("GET", "/v1/status"))
        status = json.loads(read_answer(file)[2])
    assert api.daemon is not None
    assert status["pid"] == api.daemon.pid
    assert status["kernel"] == os.uname().release
    assert status["fallbacks"] == {}
    assert status["uptime_s"] >= 0
