"""What the daemon makes of a worker's socket that answers, is silent, breaks or is not there. Needs no root."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio

from bootseer.core import errors, wire
from bootseer.daemon.workers import SOCKET_NAME, WorkerDeadError, call, owner_pid

Behaviour = Callable[[trio.SocketStream], Awaitable[None]]


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path (unix sockets: 107 bytes)."""
    path = Path(tempfile.mkdtemp(prefix="bsr-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def listen(directory: Path) -> trio.SocketListener:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(directory / SOCKET_NAME))
    listener.listen(16)
    return trio.SocketListener(trio.socket.from_stdlib_socket(listener))


async def ask(directory: Path, behaviour: Behaviour, timeout_s: float = 5.0) -> wire.WorkerReply:
    """``statistics`` from a worker that behaves like this."""
    outcome: wire.WorkerReply | errors.BootseerError
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, behaviour, [listen(directory)])
        try:
            outcome = (await call(directory, "statistics", timeout_s=timeout_s))[0]
        except errors.BootseerError as error:
            outcome = error  # raised outside, where no nursery wraps it
        nursery.cancel_scope.cancel()
    if isinstance(outcome, errors.BootseerError):
        raise outcome
    return outcome


def answering(*pieces: bytes) -> Behaviour:
    async def behave(stream: trio.SocketStream) -> None:
        assert wire.decode(await stream.receive_some(), wire.WorkerCall).op == "statistics"
        for piece in pieces:
            await stream.send_all(piece)
        await stream.aclose()

    return behave


async def test_an_answer_in_pieces(directory: Path) -> None:
    line = wire.encode(wire.WorkerReply(pid=7, values={"a": 1})) + b"\n"
    reply = await ask(directory, answering(line[:5], line[5:]))
    assert (reply.pid, reply.values) == (7, {"a": 1})


async def test_an_error_is_raised_as_what_it_was(directory: Path) -> None:
    reply = wire.WorkerReply(pid=7, error=wire.ErrorBody("integrity", "a chunk is wrong", "fetch again"))
    with pytest.raises(errors.IntegrityError, match="a chunk is wrong") as caught:
        await ask(directory, answering(wire.encode(reply) + b"\n"))
    assert caught.value.hint == "fetch again"


@pytest.mark.parametrize("pieces", [(), (b'{"pid": 7',)])
async def test_a_worker_that_goes_away(directory: Path, pieces: tuple[bytes, ...]) -> None:
    with pytest.raises(errors.InternalError, match="went away") as caught:
        await ask(directory, answering(*pieces))
    assert not isinstance(caught.value, WorkerDeadError)  # the next attempt finds out


async def test_an_answer_that_is_none(directory: Path) -> None:
    with pytest.raises(errors.UsageError, match="malformed WorkerReply"):
        await ask(directory, answering(b"garbage\n"))


async def test_a_silent_worker_is_a_timeout(directory: Path) -> None:
    async def silent(stream: trio.SocketStream) -> None:
        await trio.sleep_forever()

    with pytest.raises(errors.TimeoutExpiredError, match=r"did not answer statistics in 0\.01 s"):
        await ask(directory, silent, timeout_s=0.01)


async def test_a_worker_that_dies_between_connect_and_send(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = listen(directory)
    send_all = trio.SocketStream.send_all

    async def late(self: trio.SocketStream, data: bytes) -> None:
        await listener.aclose()  # resets what waits in its queue
        await send_all(self, data)

    monkeypatch.setattr(trio.SocketStream, "send_all", late)
    with pytest.raises(errors.InternalError, match="cannot be reached: the connection broke"):
        await call(directory, "statistics")


async def test_a_dead_worker_is_told_from_a_silent_one(directory: Path) -> None:
    with pytest.raises(WorkerDeadError):
        await call(directory, "hello")
    assert owner_pid(directory) == 0
    listener = listen(directory)
    assert owner_pid(directory) == os.getpid()
    await listener.aclose()
    with pytest.raises(WorkerDeadError):
        await call(directory, "hello")
    assert owner_pid(directory) == 0
