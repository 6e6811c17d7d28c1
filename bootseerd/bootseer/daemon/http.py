"""A small HTTP/1.1 server on a trio stream: parses with h11, calls one handler, answers JSON."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

import h11
import trio

from bootseer.core import errors, wire

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
_IDLE_TIMEOUT_S = 60.0
_STATUS = {
    "usage": 400,
    "permission": 403,
    "not_found": 404,
    "method": 405,
    "integrity": 502,
    "backend_unavailable": 502,
    "timeout": 504,
}


@dataclass(frozen=True)
class Request:
    """What a handler sees."""

    method: str
    path: str
    query: dict[str, str]
    body: bytes


Handler = Callable[[Request], Awaitable[tuple[int, object]]]


class MethodNotAllowedError(errors.UsageError):
    """The path exists, the method does not."""

    code = "method"


async def serve_connection(stream: trio.abc.Stream, handler: Handler) -> None:
    """Answer requests on one connection until the client is done; raises nothing, whatever it does."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=65536)
    try:
        async with stream:
            await _serve_requests(connection, stream, handler)
    except (trio.BrokenResourceError, trio.TooSlowError):
        pass  # the client went away, or neither speaks nor listens
    except Exception:
        log.exception("a connection failed")


async def _serve_requests(connection: h11.Connection, stream: trio.abc.Stream, handler: Handler) -> None:
    try:
        while True:
            with trio.fail_after(_IDLE_TIMEOUT_S):
                request = await _receive(connection, stream)
            if request is None:
                return
            status, record = await _handle(request, handler)
            await _send(connection, stream, status, wire.encode(record) + b"\n")
            if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                return
            connection.start_next_cycle()
    except h11.RemoteProtocolError as error:
        if connection.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            body = wire.ErrorBody("usage", str(error))
            await _send(connection, stream, error.error_status_hint, wire.encode(body) + b"\n")


async def _handle(request: Request, handler: Handler) -> tuple[int, object]:
    try:
        return await handler(request)
    except errors.BootseerError as error:
        return _STATUS.get(error.code, 500), wire.ErrorBody.of(error)
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        return 500, wire.ErrorBody(
            "internal", f"{type(error).__name__}: {error}", "this is a bug, see the daemon's log"
        )


async def _receive(connection: h11.Connection, stream: trio.abc.Stream) -> Request | None:
    head: h11.Request | None = None
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            if connection.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=100, headers=[])
                await stream.send_all(_bytes(connection, go_on))
            connection.receive_data(bytes(await stream.receive_some(65536)))
        elif isinstance(event, h11.Request):
            head = event
            if event.method == b"HEAD":  # must not be answered with a body, so not with our errors either
                answer = h11.Response(status_code=405, headers=[("Connection", "close")])
                await stream.send_all(_bytes(connection, answer, h11.EndOfMessage()))
                return None
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > MAX_BODY_BYTES:
                raise h11.RemoteProtocolError("the body is too large", error_status_hint=413)
        elif isinstance(event, h11.EndOfMessage):
            assert head is not None
            try:
                target = urlsplit(head.target.decode("latin-1"))
            except ValueError as error:
                raise h11.RemoteProtocolError(f"malformed target: {error}") from None
            query = {name: values[-1] for name, values in parse_qs(target.query).items()}
            return Request(head.method.decode("ascii"), target.path, query, bytes(body))
        else:  # ConnectionClosed, PAUSED
            return None


async def _send(connection: h11.Connection, stream: trio.abc.Stream, status: int, body: bytes) -> None:
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    data = _bytes(
        connection, h11.Response(status_code=status, headers=headers), h11.Data(body), h11.EndOfMessage()
    )
    with trio.fail_after(_IDLE_TIMEOUT_S):
        await stream.send_all(data)


def _bytes(connection: h11.Connection, *events: h11.Event) -> bytes:
    return b"".join(connection.send(event) or b"" for event in events)
