"""An OCI image layout over plain HTTP(S): its documents, not its chunks (those are native's).

Bounded in everything that an origin decides: time, size, redirects.
"""

from __future__ import annotations

import base64
import http.client
import random
import socket
import threading
import time
from contextlib import suppress
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from bootseer.core.errors import (
    BackendUnavailableError,
    BootseerError,
    IntegrityError,
    NotFoundError,
    PermissionDeniedError,
    TimeoutExpiredError,
    UsageError,
)
from bootseer.core.wire import Endpoint

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_TRANSIENT = frozenset({429, 500, 502, 503, 504})
_MAX_REDIRECTS = 5
_ATTEMPTS = 4
_FIRST_PAUSE_S = 0.1
_PIECE_BYTES = 1 << 20
# Of a path; what is escaped already stays as it is.
_SAFE = "/%:@!$&'()*+,;=~"


class _TransientError(Exception):
    """Worth another attempt; ``args[0]`` says what went wrong."""


class HttpStore:
    """A layout below a URL. ``timeout_s`` bounds all of its requests together, counted from its making."""

    def __init__(self, base_url: str, timeout_s: float) -> None:
        self._base = _split(base_url)
        if self._base.query or self._base.fragment:
            raise UsageError(f"{_shown(self._base)}: the URL of an image has no ? or #")
        self.name = _shown(self._base)
        self._url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._kept: http.client.HTTPConnection | None = None  # of the base's host, for the next request

    def endpoints(self, path: str) -> list[Endpoint]:
        """See :class:`bootseer.image.layout.Store`."""
        return [Endpoint(url=self._where(path))]

    def _where(self, path: str) -> str:
        return f"{self._url}/{path}"

    def close(self) -> None:
        """See :class:`bootseer.image.layout.Store`."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def get(self, path: str, max_bytes: int) -> bytes:
        """See :class:`bootseer.image.layout.Store`; also TimeoutExpiredError and PermissionDeniedError."""
        where = f"{self.name}/{path}"
        last = "no attempt was made"
        for attempt in range(_ATTEMPTS):
            if attempt > 0:
                # Jitter: the nodes of a job start at once.
                pause_s = _FIRST_PAUSE_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
                time.sleep(max(0.0, min(pause_s, self._deadline - time.monotonic())))
            try:
                return self._follow(self._where(path), where, max_bytes)
            except _TransientError as error:
                last = str(error)
            if time.monotonic() >= self._deadline:
                raise TimeoutExpiredError(
                    f"{where}: no answer in {self._timeout_s:g} s", hint=last or None
                ) from None
        raise BackendUnavailableError(f"{where}: {last}", hint="is the origin up?")

    def _follow(self, url: str, where: str, max_bytes: int) -> bytes:
        for _ in range(_MAX_REDIRECTS + 1):
            status, location, data = self._request(_split(url), where, max_bytes)
            if status == 200:
                return data
            if status not in _REDIRECTS or not location:
                raise _refusal(status, where)
            url = urljoin(url, location)
        raise BackendUnavailableError(f"{where}: more than {_MAX_REDIRECTS} redirects")

    def _request(self, url: SplitResult, where: str, max_bytes: int) -> tuple[int, str, bytes]:
        """Status, Location and body of one GET; the body only of an answer 200."""
        is_base = (url.scheme, url.netloc) == (self._base.scheme, self._base.netloc)
        kept = self._kept if is_base else None
        self._kept = None
        if kept is not None:
            with suppress(_TransientError):  # the server may have closed it meanwhile
                return self._ask(kept, url, where, max_bytes, is_base)
        return self._ask(_connection(url), url, where, max_bytes, is_base)

    def _ask(
        self, connection: http.client.HTTPConnection, url: SplitResult, where: str, max_bytes: int, keep: bool
    ) -> tuple[int, str, bytes]:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise _TransientError("")
        connection.timeout = left_s
        # Socket timeouts start anew with each byte; this one does not.
        watchdog = threading.Timer(left_s, _hang_up, [connection])
        watchdog.daemon = True
        watchdog.start()
        done = False
        try:
            path = quote(url.path or "/", safe=_SAFE) + (f"?{url.query}" if url.query else "")
            connection.request("GET", path, headers=_authorization(url) if keep else {})
            with connection.getresponse() as response:  # it may own the socket
                data = _read(response, where, max_bytes) if response.status == 200 else b""
                done = keep and response.isclosed() and not response.will_close
                return response.status, response.headers.get("Location", ""), data
        except BootseerError:
            raise
        except ConnectionRefusedError as error:
            raise BackendUnavailableError(f"{where}: {_reason(error)}", hint="is the origin up?") from None
        except socket.gaierror as error:
            raise BackendUnavailableError(f"{where}: {_reason(error)}", hint="check the host name") from None
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise _TransientError(_reason(error)) from None
        finally:
            watchdog.cancel()
            if done:
                self._kept = connection
            else:
                connection.close()


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"{url[:200]!r} is no URL: {error}") from None
    if not host or parts.scheme not in {"http", "https"} or any(c <= " " for c in url):
        raise UsageError(f"{url[:200]!r} is no http(s) URL with a host")
    return parts


def _shown(url: SplitResult) -> str:
    """For messages: without user and password."""
    host = url.netloc.rpartition("@")[2]
    return f"{url.scheme}://{host}{url.path.rstrip('/')}"


def _connection(url: SplitResult) -> http.client.HTTPConnection:
    assert url.hostname is not None
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    return kind(url.hostname, url.port)


def _hang_up(connection: http.client.HTTPConnection) -> None:
    with suppress(OSError, AttributeError):
        connection.sock.shutdown(socket.SHUT_RDWR)


def _authorization(url: SplitResult) -> dict[str, str]:
    if url.username is None:
        return {}
    pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
    return {"Authorization": "Basic " + base64.b64encode(pair.encode()).decode("ascii")}


def _read(response: http.client.HTTPResponse, where: str, max_bytes: int) -> bytes:
    too_large = IntegrityError(f"{where} is larger than {max_bytes} bytes")
    if response.length is not None and response.length > max_bytes:
        raise too_large
    data = bytearray()
    while piece := response.read1(_PIECE_BYTES):
        data += piece
        if len(data) > max_bytes:
            raise too_large
    if response.length:
        raise _TransientError(f"the answer ends {response.length} bytes too early")
    response.close()  # read1() leaves it open, and the connection taken
    return bytes(data)


def _refusal(status: int, where: str) -> Exception:
    name = http.client.responses.get(status, "")
    if status in {404, 410}:
        return NotFoundError(f"{where} does not exist")
    if status in {401, 403}:
        return PermissionDeniedError(f"{where}: {status} {name}", hint="the origin wants other credentials")
    if status in _TRANSIENT:
        return _TransientError(f"the origin answers {status} {name}")
    return BackendUnavailableError(f"{where}: the origin answers {status} {name}")


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
