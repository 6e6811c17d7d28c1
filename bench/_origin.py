"""An HTTP origin whose answers arrive one round trip late: ``python -m bench._origin DIR --rtt-ms 2``.

There is no netem here, so the bandwidth comes from a token bucket on the link (``bench._network``) and the round
trip from this process: it waits ``rtt`` before each answer and once more for each new connection (the TCP
handshake). Serves GET and HEAD with single byte ranges, keep-alive, from files by sendfile. Prints its port.
"""

from __future__ import annotations

import argparse
import os
import socket
import threading
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit


def serve(directory: Path, address: str, rtt_s: float) -> None:
    """Serve ``directory`` for ever, one thread a connection."""
    listener = socket.create_server((address, 0), backlog=256)
    print(listener.getsockname()[1], flush=True)
    root = directory.resolve()
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_connection, args=(connection, root, rtt_s), daemon=True).start()


def _connection(connection: socket.socket, root: Path, rtt_s: float) -> None:
    time.sleep(rtt_s)
    with connection, connection.makefile("rb") as lines:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while _request(connection, lines, root, rtt_s):
                pass
        except OSError:
            return  # the client went away, as a cancelled fetch does


def _request(connection: socket.socket, lines: object, root: Path, rtt_s: float) -> bool:
    readline = lines.readline  # type: ignore[attr-defined]
    request = readline(65536).decode("latin-1").split()
    if len(request) != 3:
        return False
    method, target, _ = request
    byte_range = None
    keep_alive = True
    while (line := readline(65536)) not in (b"\r\n", b"\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        if name.lower() == "range":
            byte_range = value.strip()
        elif name.lower() == "connection" and value.strip().lower() == "close":
            keep_alive = False
    time.sleep(rtt_s)
    path = (root / unquote(urlsplit(target).path).lstrip("/")).resolve()
    if not path.is_relative_to(root) or not path.is_file():
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        return keep_alive
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        first, last, status = 0, size - 1, b"200 OK"
        extra = b""
        if byte_range is not None:
            start, _, end = byte_range.removeprefix("bytes=").partition("-")
            first, last = int(start), min(int(end) if end else size - 1, size - 1)
            if first > last:
                connection.sendall(b"HTTP/1.1 416 Range Not Satisfiable\r\nContent-Length: 0\r\n\r\n")
                return keep_alive
            status = b"206 Partial Content"
            extra = b"Content-Range: bytes %d-%d/%d\r\n" % (first, last, size)
        count = last - first + 1
        head = b"HTTP/1.1 %s\r\nAccept-Ranges: bytes\r\nContent-Length: %d\r\n%s\r\n" % (status, count, extra)
        connection.sendall(head, socket.MSG_MORE if method == "GET" else 0)
        while method == "GET" and count > 0:
            sent = os.sendfile(connection.fileno(), file.fileno(), first, count)
            if sent == 0:
                return False
            first, count = first + sent, count - sent
    return keep_alive


def main() -> None:
    """Command line: directory, --address, --rtt-ms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--rtt-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    serve(arguments.directory, arguments.address, arguments.rtt_ms / 1000)


if __name__ == "__main__":
    main()
