"""An HTTP origin for tests that can misbehave in every way an origin can, and images to serve from it."""

from __future__ import annotations

import hashlib
import random
import re
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from bootseer.native._core import ChunkMap

PAGE = 4096


@dataclass
class Image:
    """Raw bytes, the blob that makes them, and the map between the two."""

    raw: bytes
    blob: bytes
    map: ChunkMap

    @property
    def key(self) -> str:
        return hashlib.sha256(self.blob).hexdigest()


def zstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-q", "-c", "-3"], input=data, stdout=subprocess.PIPE, check=True).stdout


def make_image(chunks: int = 24, *, seed: int = 1, tail_bytes: int = 777, compressed: int = 4) -> Image:
    """Chunks of 4 to 64 KiB: some compressed (that many, zstd is a process each), some stored, some zeros."""
    rng = random.Random(seed)
    raw, blob = bytearray(), bytearray()
    entries: list[tuple[int, int, int, int, bytes]] = []
    for index in range(chunks):
        length = tail_bytes if index == chunks - 1 else rng.randrange(1, 17) * PAGE
        if index % 7 == 3:
            data = bytes(length)
            entries.append((len(raw), length, 0, 0, hashlib.sha256(data).digest()))
            raw += data
            continue
        if index < compressed:
            data = (rng.randbytes(256) * (length // 256 + 1))[:length]
            stored = zstd(data)
        else:
            data = stored = rng.randbytes(length)
        entries.append((len(raw), length, len(blob), len(stored), hashlib.sha256(data).digest()))
        raw += data
        blob += stored
    chunk_map = ChunkMap(len(raw), min(PAGE, len(raw)), len(blob), hashlib.sha256(blob).digest(), entries)
    return Image(bytes(raw), bytes(blob), chunk_map)


@dataclass
class Origin:
    """Serves ``content`` under any path. ``behaviours`` are used up one per request; then ``default``."""

    content: bytes
    default: str = "ok"
    behaviours: list[str] = field(default_factory=list)
    delay_s: float = 0.0
    port: int = 0
    requests: list[tuple[int, int]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    redirect_to: str = ""
    scheme: str = "http"
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/blob"

    def next_behaviour(self) -> str:
        with self.lock:
            return self.behaviours.pop(0) if self.behaviours else self.default


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        origin = self.server.origin
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        assert match is not None, self.headers.get("Range")
        first, last = int(match[1]), int(match[2])
        with origin.lock:
            origin.requests.append((first, last))
            origin.headers.append(dict(self.headers.items()))
        if origin.delay_s:
            time.sleep(origin.delay_s)
        body = origin.content[first : last + 1]
        self._answer(origin.next_behaviour(), origin, first, last, body)

    def _head(self, status: int, length: int, content_range: str | None = None, **more: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        if content_range is not None:
            self.send_header("Content-Range", content_range)
        for name, value in more.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def _answer(self, behaviour: str, origin: Origin, first: int, last: int, body: bytes) -> None:
        total = len(origin.content)
        right = f"bytes {first}-{last}/{total}"
        if behaviour == "ok":
            self._head(206, len(body), right)
            self.wfile.write(body)
        elif behaviour == "lie":
            self._head(206, len(body), right)
            self.wfile.write(bytes(b ^ 0xFF for b in body))
        elif behaviour == "truncate":  # announces all, sends half, hangs up
            self._head(206, len(body), right)
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        elif behaviour == "short":  # announces and sends less than asked for
            self._head(206, len(body) - 1, right)
            self.wfile.write(body[:-1])
        elif behaviour == "long":
            self._head(206, len(body) + 5, right)
            self.wfile.write(body + b"extra")
        elif behaviour == "long_chunked":  # no length announced, and too much
            self.send_response(206)
            self.send_header("Content-Range", right)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            data = body + b"extra"
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n0\r\n\r\n")
        elif behaviour == "whole":
            self._head(200, total)
            self.wfile.write(origin.content)
        elif behaviour == "wrong_range":
            self._head(206, len(body), f"bytes {first + 1}-{last + 1}/{total}")
            self.wfile.write(body)
        elif behaviour == "no_range":
            self._head(206, len(body))
            self.wfile.write(body)
        elif behaviour == "encoded":
            self._head(206, len(body), right, Content_Encoding="gzip")
            self.wfile.write(body)
        elif behaviour == "reset":
            self._head(206, len(body), right)
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
        elif behaviour == "stall":  # head, half a body, then silence
            self._head(206, len(body), right)
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.server.release.wait(20)
            self.close_connection = True
        elif behaviour.startswith("redirect"):
            self._head(302, 0, Location=origin.redirect_to)
        elif behaviour.startswith("retry_after"):
            self._head(503, 4, Retry_After=behaviour.split(":")[1])
            self.wfile.write(b"busy")
        else:
            self._head(int(behaviour), 4)
            self.wfile.write(b"nope")

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = (
        64  # of connections; the default of 5 makes a client that opens eight wait for a second
    )
    origin: Origin
    release: threading.Event

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients hang up all the time here


@contextmanager
def serve(
    content: bytes,
    default: str = "ok",
    behaviours: list[str] | None = None,
    *,
    port: int = 0,
    certificate: Path | None = None,
) -> Iterator[Origin]:
    """``certificate``: PEM file with certificate and key; speaks HTTPS then."""
    origin = Origin(content, default, behaviours or [])
    server = _Server(("127.0.0.1", port), _Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        origin.scheme = "https"
    server.origin = origin
    server.release = threading.Event()
    origin.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield origin
    finally:
        server.release.set()
        server.shutdown()
        server.server_close()
        thread.join()


def flip(path: Path, offset: int) -> None:
    """Damage one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x01]))
