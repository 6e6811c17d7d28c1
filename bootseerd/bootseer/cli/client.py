"""The daemon's API from a verb: HTTP over a unix socket.

By hand, because a verb's start-up time is imports, and http.client brings the parsers of mail and TLS with it. The
daemon answers every request with a Content-Length and closes the connection when it is asked to.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TypeVar

from bootseer.core import errors, wire

T = TypeVar("T")

_TIMEOUT_S = 60.0
_MAX_ANSWER_BYTES = 256 << 20
_PIECE_BYTES = 1 << 16


class Client:
    """One daemon.

    Every method may raise DaemonUnreachableError, TimeoutExpiredError (no answer in ``timeout_s``),
    PermissionDeniedError, and whatever the daemon answers.
    """

    def __init__(self, socket_path: Path, timeout_s: float = _TIMEOUT_S) -> None:
        self.socket_path = socket_path
        self._timeout_s = timeout_s

    def status(self) -> wire.Status:
        """``GET /v1/status``."""
        return self._call("GET", "status", wire.Status)

    def mounts(self) -> list[wire.Mount]:
        """``GET /v1/mounts``."""
        return self._call("GET", "mounts", list[wire.Mount])

    def mount(self, request: wire.MountRequest) -> wire.Mount:
        """``POST /v1/mounts``."""
        return self._call("POST", "mounts", wire.Mount, request)

    def unmount(self, mount_id: str, *, lazy: bool = False) -> wire.Mount:
        """``DELETE /v1/mounts/{id}``."""
        return self._call("DELETE", f"mounts/{_escaped(mount_id)}?lazy={int(lazy)}", wire.Mount)

    def statistics(self, mount_id: str) -> dict[str, object]:
        """``GET /v1/mounts/{id}/statistics``."""
        return self._call("GET", f"mounts/{_escaped(mount_id)}/statistics", dict[str, object])

    def tell(self, mount_id: str, op: str) -> wire.Mount:
        """``POST /v1/mounts/{id}/ready`` or ``…/prefetch``."""
        return self._call("POST", f"mounts/{_escaped(mount_id)}/{op}", wire.Mount)

    def _call(self, method: str, path: str, kind: type[T], body: object = None) -> T:
        try:
            status, answer = self._exchange(method, path, b"" if body is None else wire.encode(body))
        except TimeoutError:
            raise errors.TimeoutExpiredError(
                f"bootseerd did not answer in {self._timeout_s:g} s",
                hint=f"is it stuck? ({self.socket_path})",
            ) from None
        except PermissionError:
            raise errors.PermissionDeniedError(
                f"{self.socket_path} may not be used by this user", hint="run as the daemon's user"
            ) from None
        except (OSError, ValueError) as error:
            raise errors.DaemonUnreachableError(
                f"no bootseerd answers on {self.socket_path} ({getattr(error, 'strerror', None) or error})",
                hint="start bootseerd, or name its socket with --socket",
            ) from None
        if status >= 400:
            failure = self._decode(answer, wire.ErrorBody)
            raise errors.from_code(failure.code, failure.message, failure.hint)
        return self._decode(answer, kind)

    def _exchange(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of one request. OSError, or ValueError for what is no answer."""
        head = f"{method} /{wire.API_VERSION}/{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(self._timeout_s)
            connection.connect(str(self.socket_path))
            connection.sendall(head.encode() + body)
            answer = bytearray()
            while piece := connection.recv(_PIECE_BYTES):
                answer += piece
                if len(answer) > _MAX_ANSWER_BYTES:
                    raise ValueError("its answer has no end")
        return _parse(bytes(answer))

    def _decode(self, answer: bytes, kind: type[T]) -> T:
        try:
            return wire.decode(answer, kind)
        except errors.UsageError as error:
            raise errors.DaemonUnreachableError(
                f"what answers on {self.socket_path} is no bootseerd of this version ({error.message})",
                hint="bootseer and bootseerd must come from one release",
            ) from None


def _parse(answer: bytes) -> tuple[int, bytes]:
    head, separator, body = answer.partition(b"\r\n\r\n")
    if not separator:
        raise ValueError("it answered nothing" if not answer else "its answer is cut short")
    first, *fields = head.decode("latin-1").split("\r\n")
    protocol, _, rest = first.partition(" ")
    status = rest.split(" ")[0]
    if not protocol.startswith("HTTP/1.") or len(status) != 3 or not status.isdecimal():
        raise ValueError("its answer is no HTTP")
    for field in fields:
        name, _, value = field.partition(":")
        if name.lower() == "content-length" and value.strip() != str(len(body)):
            raise ValueError("its answer is cut short")
    return int(status), body


def _escaped(mount_id: str) -> str:
    from urllib.parse import quote

    return quote(mount_id, safe="")
