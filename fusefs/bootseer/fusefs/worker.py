"""The worker: one process, one mount. ``python -m bootseer.fusefs.worker`` (started by bootseerd).

Its standard input is a socket to the daemon, and everything it needs is imported before it asks for work, so that a
mount costs no interpreter start. It receives the directory of a mount (and the device descriptor, when the mount is
to be resumed), serves until it is told to stop, and answers on ``worker.sock`` in that directory. End of file on
standard input before work has come ends it; after that the daemon may come and go.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pyfuse3
import trio

from bootseer import native
from bootseer.core import wire
from bootseer.core.errors import BootseerError, InternalError, UsageError
from bootseer.fusefs.blobs import open_blobs
from bootseer.fusefs.operations import Operations
from bootseer.fusefs.tree import ROOT_INODE, Tree

log = logging.getLogger(__name__)

IMAGE_NAME = b"image.erofs"
MAX_MESSAGE_BYTES = 1 << 16
SOCKET_NAME = "worker.sock"
_ANSWER_TIMEOUT_S = 10.0
_LONGEST_SILENCE_S = 10.0


class Worker:
    """Everything that serves one mount. ``device_fd`` is set when the mount exists already."""

    def __init__(self, directory: Path, device_fd: int | None) -> None:
        # First, so that a directory that was given up meanwhile is noticed before anything is mounted, and so that a
        # call that comes right after the mount waits in the queue instead of being refused.
        self._listener = _listen(directory / SOCKET_NAME)
        self.spec = wire.decode((directory / "spec.json").read_bytes(), wire.WorkerSpec)
        spec = self.spec
        chunk_map = native.ChunkMap.load(spec.chunk_map_path)
        self._cache = native.Cache(spec.cache_dir)
        record = spec.record and not spec.ready
        # Half of a deadline: an origin that fell silent is asked again while the reader still waits.
        silence_s = min(_LONGEST_SILENCE_S, spec.deadline_s / 2)
        source = open_blobs(spec.blobs, connect_timeout_s=silence_s)
        self.file = native.BlockFile(
            self._cache,
            spec.cache_key,
            chunk_map,
            source,
            trace_path=spec.mount.trace_path if record else None,
            deadline_s=spec.deadline_s,
            background_fill=spec.background_fill,
            record=record,
        )
        if spec.ready:
            self.file.mark_ready()
        if spec.prefetch and not spec.ready:
            # Before anything else: the network should be busy from the first millisecond. A successor goes on with
            # what is left of the plan.
            try:
                self.prefetch()
            except (OSError, TypeError, ValueError, BootseerError) as error:
                log.warning("no prefetch: %s", error)  # the start is slower, and that is all
        tree = Tree()
        image = tree.add_file(ROOT_INODE, IMAGE_NAME, chunk_map.image_bytes)
        tree.add_generated(tree.add_dir(ROOT_INODE, b".bootseer"), b"stats.json", self._statistics_json)
        if device_fd is None:
            # Passthrough would make this a stacked file system, on which EROFS mounts only by a loop device; and an
            # image is not complete when it is opened, so that it would not be used anyway.
            self.session = native.Session.mount(
                spec.mount.fuse_mountpoint, state_dir=spec.state_dir, passthrough=False
            )
        else:
            self.session = native.Session.resume(
                device_fd, mountpoint=spec.mount.fuse_mountpoint, state_dir=spec.state_dir, passthrough=False
            )
        self._detached = False
        self.session.add_file(image, self.file)
        options = set(pyfuse3.default_options)
        options.discard("default_permissions")  # the mount has it; this libfuse mounts nothing
        pyfuse3.init(Operations(tree), f"/dev/fd/{self.session.control_fd}", options)
        self.session.start()

    def prefetch(self) -> None:
        """Fetch what the plan says, in its order."""
        plan = json.loads(Path(self.spec.plan_path).read_bytes())
        self.file.prefetch([(int(chunk), int(t_ns)) for chunk, t_ns in plan])

    def statistics(self) -> dict[str, Any]:
        """Flat: ``file.*`` from the BlockFile, ``session.*`` from the Session."""
        values = {f"file.{name}": value for name, value in self.file.statistics().items()}
        values |= {f"session.{name}": value for name, value in self.session.statistics().items()}
        values |= {f"session.{name}": value for name, value in self.session.info().items()}
        return values

    def _statistics_json(self) -> bytes:
        return json.dumps(self.statistics(), indent=1).encode() + b"\n"

    async def serve(self) -> None:
        """Serve FUSE and ``worker.sock`` until stopped or unmounted."""
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._listener))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, self._connection, [listener])
            nursery.start_soon(self._stop_on_signal)
            nursery.start_soon(self._stop_when_unmounted)
            await pyfuse3.main()
            nursery.cancel_scope.cancel()

    async def _stop_when_unmounted(self) -> None:
        await trio.lowlevel.wait_readable(self.session.ended_fd)
        pyfuse3.terminate()

    async def _stop_on_signal(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                pyfuse3.terminate()

    async def _connection(self, stream: trio.SocketStream) -> None:
        connection = stream.socket
        async with stream:
            buffer = b""
            try:
                while data := await connection.recv(MAX_MESSAGE_BYTES):
                    buffer += data
                    *lines, buffer = buffer.split(b"\n")
                    for line in lines:
                        # Also when the mount ends meanwhile: that is what an unmount is answered with.
                        with trio.move_on_after(_ANSWER_TIMEOUT_S, shield=True):
                            await self._answer(connection, line)
                    if len(buffer) > MAX_MESSAGE_BYTES:
                        return
            except OSError:
                return  # the daemon went away; the next one connects again

    async def _answer(self, connection: trio.socket.SocketType, line: bytes) -> None:
        reply = wire.WorkerReply(pid=os.getpid())
        ancillary: list[tuple[int, int, bytes]] = []
        ending = False
        try:
            call = wire.decode(line, wire.WorkerCall)
            match call.op:
                case "hello":
                    ancillary = [_fd_message(self.session.device_fd)]
                    reply.values = {"detached": self._detached, "protocol": wire.WORKER_PROTOCOL}
                case "statistics":
                    reply.values = self.statistics()
                case "prefetch":
                    self.prefetch()
                case "ready":
                    self.file.mark_ready()
                case "unmount":
                    await trio.to_thread.run_sync(lambda: self.session.unmount(lazy=call.lazy))
                    # Detached only: who has files open is served until the last one is closed.
                    self._detached = True
                case "stop":
                    ending = True
        except OSError as error:
            if error.errno == errno.EBUSY:
                busy = UsageError("the mount is busy", hint="end its users, or unmount lazily")
                reply.error = wire.ErrorBody.of(busy)
            else:
                reply.error = wire.ErrorBody(InternalError.code, error.strerror or str(error))
        except BootseerError as error:
            reply.error = wire.ErrorBody.of(error)
        except Exception as error:  # a fault in one call must not end the mount
            log.exception("%r failed", line[:100])
            reply.error = wire.ErrorBody(InternalError.code, f"{type(error).__name__}: {error}")
        await connection.sendmsg([wire.encode(reply) + b"\n"], ancillary)
        if ending:
            pyfuse3.terminate()

    def close(self) -> None:
        """Stop the threads; the mount stays as it is."""
        pyfuse3.close(unmount=False)
        self.session.stop()
        self.file.close()
        self._cache.close()


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(16)
    return listener


def _fd_message(fd: int) -> tuple[int, int, bytes]:
    return (socket.SOL_SOCKET, socket.SCM_RIGHTS, fd.to_bytes(4, sys.byteorder))


def receive_work(channel: socket.socket) -> tuple[Path, int | None] | None:
    """Wait for work: the directory of a mount and perhaps its device descriptor; ``None`` when none will come."""
    data, fds, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, 1)
    if not data:
        return None
    return Path(wire.decode(data, wire.WorkerStart).directory), fds[0] if fds else None


def _log_as(name: str) -> None:
    """The workers of a node share a log: each line says whose it is."""
    line = f"%(asctime)s %(levelname)s {name}[%(process)d] %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=line, force=True)


def main() -> None:
    """Entry point."""
    _log_as("spare")
    with socket.socket(fileno=0) as channel:
        work = receive_work(channel)
        if work is None:
            return
        _log_as(work[0].name)
        try:
            worker = Worker(*work)
        except Exception as error:
            body = (
                error
                if isinstance(error, BootseerError)
                else InternalError(f"{error or type(error).__name__}")
            )
            log.error(
                "cannot serve: %s",
                body,
                exc_info=None if isinstance(error, BootseerError | OSError) else error,
            )
            with contextlib.suppress(OSError):
                channel.sendall(wire.encode(wire.WorkerReady(os.getpid(), error=wire.ErrorBody.of(body))))
            sys.exit(body.exit_code)
        try:
            socket.send_fds(channel, [wire.encode(wire.WorkerReady(os.getpid()))], [worker.session.device_fd])
        except OSError:
            log.warning("the daemon went away meanwhile; the next one will find this mount")
        channel.detach()
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    try:
        trio.run(worker.serve)
    finally:
        worker.close()


if __name__ == "__main__":
    main()
