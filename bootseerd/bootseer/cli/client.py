"""The daemon's API from a verb: HTTP over a unix socket with the standard library, which is quick to import."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlencode

from bootseer.core import errors, wire

T = TypeVar("T")

_TIMEOUT_S = 60.0
_MAX_ANSWER_BYTES = 256 << 20


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


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
        query = urlencode({"lazy": int(lazy)})
        return self._call("DELETE", f"mounts/{quote(mount_id, safe='')}?{query}", wire.Mount)

    def statistics(self, mount_id: str) -> dict[str, object]:
        """``GET /v1/mounts/{id}/statistics``."""
        return self._call("GET", f"mounts/{quote(mount_id, safe='')}/statistics", dict[str, object])

    def tell(self, mount_id: str, op: str) -> wire.Mount:
        """``POST /v1/mounts/{id}/ready`` or ``…/prefetch``."""
        return self._call("POST", f"mounts/{quote(mount_id, safe='')}/{op}", wire.Mount)

    def _call(self, method: str, path: str, kind: type[T], body: object = None) -> T:
        connection = _UnixConnection(self.socket_path, self._timeout_s)
        try:
            data = None if body is None else wire.encode(body)
            connection.request(method, f"/{wire.API_VERSION}/{path}", data, {"Connection": "close"})
            response = connection.getresponse()
            answer = response.read(_MAX_ANSWER_BYTES)
        except TimeoutError:
            raise errors.TimeoutExpiredError(
                f"bootseerd did not answer in {self._timeout_s:g} s",
                hint=f"is it stuck? ({self.socket_path})",
            ) from None
        except PermissionError:
            raise errors.PermissionDeniedError(
                f"{self.socket_path} may not be used by this user", hint="run as the daemon's user"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise errors.DaemonUnreachableError(
                f"no bootseerd answers on {self.socket_path} ({_reason(error)})",
                hint="start bootseerd, or name its socket with --socket",
            ) from None
        finally:
            connection.close()
        if response.status >= 400:
            failure = self._decode(answer, wire.ErrorBody)
            raise errors.from_code(failure.code, failure.message, failure.hint)
        return self._decode(answer, kind)

    def _decode(self, answer: bytes, kind: type[T]) -> T:
        try:
            return wire.decode(answer, kind)
        except errors.UsageError as error:
            raise errors.DaemonUnreachableError(
                f"what answers on {self.socket_path} is no bootseerd of this version ({error.message})",
                hint="bootseer and bootseerd must come from one release",
            ) from None


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
