"""``bootseerd``: the daemon of a node."""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import signal
import socket
import struct
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

import trio

from bootseer.core import errors, paths
from bootseer.daemon.api import Api
from bootseer.daemon.http import serve_connection
from bootseer.daemon.supervisor import Supervisor
from bootseer.daemon.workers import MAX_SOCKET_PATH_BYTES

log = logging.getLogger("bootseer.daemon")


async def serve(supervisor: Supervisor, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT; mounts and their workers stay."""
    api = Api(supervisor)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_stop_on_signal, nursery.cancel_scope)
        await nursery.start(supervisor.run)
        _notify_ready()
        log.info("listening on %s", listener.getsockname())
        listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(listener))]
        await trio.serve_listeners(partial(_serve_peer, api), listeners, handler_nursery=nursery)


async def _serve_peer(api: Api, stream: trio.SocketStream) -> None:
    credentials = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    if uid not in {0, os.getuid()}:
        await stream.aclose()  # the mode of the socket keeps others out already
        return
    await serve_connection(stream, api.handle)


def _listen(path: Path) -> socket.socket:
    """The API's socket, for its owner only."""
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise errors.ConfigError(f"{path} is too long for a socket", hint="give a shorter --socket")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_socket():
        raise errors.ConfigError(f"{path} exists and is not a socket", hint="give another --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise errors.ConfigError(f"another bootseerd answers on {path}", hint="give another --socket")
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)
    listener.listen(1024)  # a client with a timeout is refused when the queue is full
    return listener


async def _stop_on_signal(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            log.info("%s: leaving; mounts stay", signal.Signals(number).name)
            scope.cancel()


def _notify_ready() -> None:
    """sd_notify(3), for Type=notify."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.connect("\0" + address[1:] if address.startswith("@") else address)
        channel.sendall(b"READY=1")


def _lock(run_dir: Path) -> int:
    run_dir.mkdir(parents=True, exist_ok=True)
    fd = os.open(run_dir / "bootseerd.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise errors.ConfigError(
            f"another bootseerd runs on {run_dir}", hint="give this one its own --run-dir"
        ) from None
    return fd


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="bootseerd", description=__doc__)
    parser.add_argument("--socket", type=Path, default=paths.socket_path(), help="API socket (%(default)s)")
    parser.add_argument(
        "--run-dir", type=Path, default=None, help="run directory (default: beside the socket)"
    )
    parser.add_argument(
        "--state-dir", type=Path, default=paths.state_dir(), help="cache, traces (%(default)s)"
    )
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    parser.add_argument("--version", action="version", version=f"bootseerd {version('bootseer')}")
    arguments = parser.parse_args()
    logging.basicConfig(level=arguments.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    socket_path = arguments.socket.absolute()
    run_dir = (arguments.run_dir or socket_path.parent).absolute()
    try:
        _lock(run_dir)
        supervisor = Supervisor(run_dir, arguments.state_dir.absolute(), version("bootseer"))
        trio.run(serve, supervisor, _listen(socket_path))
    except errors.BootseerError as error:
        print(f"bootseerd: {error.message}" + (f" ({error.hint})" if error.hint else ""), file=sys.stderr)
        sys.exit(error.exit_code)
    except PermissionError as error:
        print(f"bootseerd: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(errors.PermissionDeniedError.exit_code)
    except OSError as error:
        print(f"bootseerd: {error.filename or socket_path}: {error.strerror}", file=sys.stderr)
        sys.exit(errors.ConfigError.exit_code)


if __name__ == "__main__":
    main()
