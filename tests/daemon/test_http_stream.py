"""The HTTP server on a stream in memory: what a handler makes of a request, and of its own faults. Needs no root."""

from __future__ import annotations

import json
import logging

import pytest
import trio
import trio.testing

from bootseer.core import errors, wire
from bootseer.daemon import http
from bootseer.daemon.api import Api
from bootseer.daemon.http import MAX_BODY_BYTES, Request, serve_connection

Answer = tuple[int, dict[str, object]]


async def echo(request: Request) -> tuple[int, object]:
    body = request.body.decode()
    return 200, {"method": request.method, "path": request.path, "query": request.query, "body": body}


async def exchange(raw: bytes, handler: http.Handler = echo) -> list[Answer]:
    """All answers to what a client sends before it closes its side."""
    client, server = trio.testing.memory_stream_pair()
    data = b""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_connection, server, handler)
        await client.send_all(raw)
        await client.send_eof()
        async for piece in client:
            data += piece
    answers = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(fields[b"content-length"])
        answers.append((int(head.split()[1]), json.loads(data[:length])))
        data = data[length:]
    return answers


def post(body: bytes, path: str = "/") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def test_what_a_handler_sees() -> None:
    (answer,) = await exchange(post(b"hello", "/a/b?lazy=0&lazy=1&x=%20"))
    seen = {"method": "POST", "path": "/a/b", "query": {"lazy": "1", "x": " "}, "body": "hello"}
    assert answer == (200, seen)


async def test_requests_in_a_row_are_answered_in_order() -> None:
    answers = await exchange(b"".join(post(b"%d" % number) for number in range(50)))
    assert [answer["body"] for _, answer in answers] == [str(number) for number in range(50)]


@pytest.mark.parametrize("excess", [0, 1])
async def test_the_largest_body(excess: int) -> None:
    ((status, answer),) = await exchange(post(b"a" * (MAX_BODY_BYTES + excess)))
    assert status == (413 if excess else 200)
    if excess:
        assert answer["code"] == "usage"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.UsageError("a"), 400),
        (errors.PermissionDeniedError("a"), 403),
        (errors.NotFoundError("a", hint="b"), 404),
        (http.MethodNotAllowedError("a"), 405),
        (errors.IntegrityError("a"), 502),
        (errors.BackendUnavailableError("a"), 502),
        (errors.TimeoutExpiredError("a"), 504),
        (errors.InternalError("a"), 500),
        (errors.ConfigError("a"), 500),
    ],
    ids=lambda value: getattr(value, "code", None),
)
async def test_an_error_of_ours_keeps_its_code(error: errors.BootseerError, status: int) -> None:
    async def fail(request: Request) -> tuple[int, object]:
        raise error

    ((got, answer),) = await exchange(post(b""), fail)
    assert (got, answer) == (status, {"code": error.code, "message": "a", "hint": error.hint})


async def test_a_bug_is_an_answer_and_the_connection_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(request: Request) -> tuple[int, object]:
        if request.body == b"bad":
            raise ZeroDivisionError("division by zero")
        return await echo(request)

    with caplog.at_level(logging.ERROR):
        (bad, good) = await exchange(post(b"bad") + post(b"good"), fail)
    assert bad[0] == 500
    assert (bad[1]["code"], bad[1]["message"]) == ("internal", "ZeroDivisionError: division by zero")
    assert good[0] == 200
    assert "POST / failed" in caplog.text


class FakeSupervisor:
    """Says what it was asked."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    async def unmount(self, mount_id: str, *, lazy: bool) -> str:
        self.calls.append((mount_id, lazy))
        return "done"

    async def tell(self, mount_id: str, op: wire.WorkerOp) -> str:
        self.calls.append((mount_id, op))
        return "done"


async def test_routes() -> None:
    fake = FakeSupervisor()
    api = Api(fake)  # type: ignore[arg-type]
    requests = [
        Request("DELETE", "/v1/mounts/a", {}, b""),
        Request("DELETE", "/v1/mounts/b", {"lazy": "1"}, b""),
        Request("DELETE", "/v1/mounts/c", {"lazy": "0"}, b""),
        Request("POST", "/v1/mounts/d/ready", {}, b""),
        Request("POST", "/v1/mounts/e/prefetch", {}, b""),
    ]
    assert [await api.handle(request) for request in requests] == [(200, "done")] * 5
    assert fake.calls == [("a", False), ("b", True), ("c", False), ("d", "ready"), ("e", "prefetch")]
    for op in ("stop", "hello", "unmount"):  # the worker's, not the API's
        with pytest.raises(errors.NotFoundError):
            await api.handle(Request("POST", f"/v1/mounts/a/{op}", {}, b""))
    with pytest.raises(http.MethodNotAllowedError):
        await api.handle(Request("PATCH", "/v1/mounts/a", {}, b""))
