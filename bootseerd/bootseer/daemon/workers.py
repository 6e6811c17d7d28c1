"""Worker processes as the daemon sees them: starting a spare, handing it a mount, talking to it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import trio

from bootseer.core import errors, wire

_MAX_MESSAGE_BYTES = 1 << 20
_START_TIMEOUT_S = 20.0
_CALL_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 1.0
_MAX_LOG_BYTES = 4 << 20
SOCKET_NAME = "worker.sock"
MAX_SOCKET_PATH_BYTES = 107  # sun_path of unix(7)


class WorkerDeadError(errors.InternalError):
    """Nobody listens on a worker's socket, so its process is gone. Silence alone would not say so."""


class Spare:
    """A started worker that has imported everything and waits for work on its standard input."""

    def __init__(self, log_path: Path) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            _rotate(log_path)
            with theirs, log_path.open("ab") as log:
                # A session of its own: a signal to the daemon's process group must not end a mount.
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "bootseer.fusefs.worker"],
                    stdin=theirs.fileno(),
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    cwd="/",
                )
        except OSError as error:
            self._channel.close()
            raise errors.InternalError(f"no worker can be started: {error}") from None

    @property
    def alive(self) -> bool:
        """Whether it still waits."""
        return self.process.poll() is None

    async def start(self, directory: Path, device_fd: int | None) -> tuple[int, int]:
        """Give it a mount; returns its pid and its device descriptor, which is the caller's to close."""
        fds = [] if device_fd is None else [device_fd]
        try:
            socket.send_fds(self._channel, [wire.encode(wire.WorkerStart(str(directory)))], fds)
            with trio.fail_after(_START_TIMEOUT_S):
                await trio.lowlevel.wait_readable(self._channel)
            data, received, _, _ = socket.recv_fds(self._channel, _MAX_MESSAGE_BYTES, 1)
        except (OSError, trio.TooSlowError) as error:
            self.discard()
            raise errors.InternalError(f"a worker did not start: {str(error) or 'timeout'}") from None
        except BaseException:  # cancelled: nobody will know of this worker
            self.discard()
            raise
        finally:
            self._channel.close()
        ready = wire.decode(data, wire.WorkerReady) if data else None
        if ready is None or ready.error is not None or not received:
            for fd in received:
                os.close(fd)
            self.discard()
            if ready is not None and ready.error is not None:
                raise errors.from_code(ready.error.code, ready.error.message, ready.error.hint)
            raise errors.InternalError(
                "a worker died while it started", hint="see worker.log in the run directory"
            )
        return ready.pid, received[0]

    def discard(self) -> None:
        """End a worker that serves nothing."""
        self._channel.close()
        if self.process.poll() is None:
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a system call; it dies when that ends
            self.process.wait(_KILL_TIMEOUT_S)


def _rotate(path: Path) -> None:
    """The run directory is often in memory, so a log in it has an end; workers go on in the file that they opened."""
    if path.exists() and path.stat().st_size > _MAX_LOG_BYTES:
        path.replace(path.with_name(f"{path.name}.1"))


def owner_pid(directory: Path) -> int:
    """The process that listens on a worker's socket, whether it answers or not; 0 when that cannot be told."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        if probe.connect_ex(str(directory / SOCKET_NAME)) != 0:
            return 0
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", credentials)[0])


async def call(
    directory: Path, op: wire.WorkerOp, *, lazy: bool = False, timeout_s: float = _CALL_TIMEOUT_S
) -> tuple[wire.WorkerReply, int | None]:
    """One request to the worker of a mount, on a connection of its own; errors of the worker are raised here.

    The descriptor that came with the answer (``hello`` only) is the caller's to close.
    """
    try:
        with trio.fail_after(timeout_s):
            connection = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with connection:
                await connection.connect(str(directory / SOCKET_NAME))
                await trio.SocketStream(connection).send_all(
                    wire.encode(wire.WorkerCall(op, lazy=lazy)) + b"\n"
                )
                data, fds = b"", []
                while not data.endswith(b"\n"):
                    received, ancillary, _, _ = await connection.recvmsg(65536, socket.CMSG_LEN(4))
                    fds += [int.from_bytes(fd[:4], sys.byteorder) for _, _, fd in ancillary]
                    if not received:
                        raise errors.InternalError("the worker went away")
                    data += received
    except trio.TooSlowError:
        raise errors.TimeoutExpiredError(f"the worker did not answer {op} in {timeout_s:g} s") from None
    except (ConnectionRefusedError, FileNotFoundError):
        raise WorkerDeadError("its worker is dead") from None
    except (OSError, trio.BrokenResourceError) as error:  # the latter: it died between connect and send
        what = error.strerror if isinstance(error, OSError) else "the connection broke"
        raise errors.InternalError(f"the worker cannot be reached: {what}") from None
    reply = wire.decode(data, wire.WorkerReply)
    if reply.error is not None:
        raise errors.from_code(reply.error.code, reply.error.message, reply.error.hint)
    return reply, fds[0] if fds else None
