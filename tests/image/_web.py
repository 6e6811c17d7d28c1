"""A web server in front of a directory that can answer in every wrong way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType

Answer = Callable[["Handler", bytes], None]
"""Gets the request and the bytes that a good server would send."""


@dataclass
class Web:
    """``answers`` maps a part of a path to who answers instead; ``requests`` are the paths asked for."""

    url: str
    root: Path
    answers: dict[str, Answer] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    ending: threading.Event = field(default_factory=threading.Event)


class Handler(BaseHTTPRequestHandler):
    """Serves ``web.root``; keeps connections open as real servers do."""

    protocol_version = "HTTP/1.1"
    web: Web

    def do_GET(self) -> None:
        self.web.requests.append(self.path)
        self.web.headers.append(dict(self.headers))
        path = self.web.root / self.path.lstrip("/").partition("?")[0]
        data = path.read_bytes() if path.is_file() else None
        for part, answer in self.web.answers.items():
            if part in self.path:
                answer(self, data or b"")
                return
        if data is None:
            self.reply(404, b"not here")
        else:
            self.reply(200, data)

    def reply(
        self,
        status: int,
        data: bytes,
        *,
        announce: int | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) if announce is None else announce))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
        if announce is not None and announce != len(data):
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # every thread is waited for

    def handle_error(self, *_: object) -> None:
        """A client that went away is no error of the server."""


@contextmanager
def served(root: Path) -> Iterator[Web]:
    """Serve a directory until the end of the block."""
    handler = type("_Handler", (Handler,), {"timeout": 30})
    with _Server(("127.0.0.1", 0), handler) as server:
        web = Web(f"http://127.0.0.1:{server.server_address[1]}", root)
        handler.web = web  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield web
        finally:
            web.ending.set()
            server.shutdown()
            thread.join()


def status(code: int, location: str | None = None) -> Answer:
    headers = {} if location is None else {"Location": location}
    return lambda request, _: request.reply(code, b"refused", headers=headers)


def body(data: bytes) -> Answer:
    return lambda request, _: request.reply(200, data)


def changed(request: Handler, data: bytes) -> None:
    """The right length and one wrong bit."""
    request.reply(200, data[:-1] + bytes([data[-1] ^ 1]))


def truncated(request: Handler, data: bytes) -> None:
    request.reply(200, data[: len(data) // 2], announce=len(data))


def nothing(request: Handler, data: bytes) -> None:
    request.reply(200, b"", announce=len(data))


def hung_up(request: Handler, _: bytes) -> None:
    request.close_connection = True


def silent(request: Handler, _: bytes) -> None:
    """Until the test is over."""
    request.web.ending.wait(60)
    request.close_connection = True


def dripping(request: Handler, data: bytes) -> None:
    """A byte now and then: no single wait is long."""
    request.send_response(200)
    request.send_header("Content-Length", str(len(data)))
    request.end_headers()
    for byte in data:
        if request.web.ending.wait(0.05):
            break
        request.wfile.write(bytes([byte]))
    request.close_connection = True


def endless(request: Handler, _: bytes) -> None:
    """More than any limit, without a length."""
    request.send_response(200)
    request.end_headers()
    request.close_connection = True
    while not request.web.ending.is_set():
        request.wfile.write(bytes(1 << 20))


def first_fails(answer: Answer) -> Answer:
    """``answer`` to the first request, the right answer to the others."""
    asked = 0

    def choose(request: Handler, data: bytes) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            answer(request, data)
        else:
            request.reply(200, data)

    return choose
