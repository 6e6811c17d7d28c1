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

from bootseer.core import config, errors
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


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bootseerd",
        description=__doc__,
        epilog="A flag overrides its environment variable (BOOTSEER_SOCKET, BOOTSEER_RUN_DIR, BOOTSEER_STATE_DIR, "
        "BOOTSEER_LOG_LEVEL), which overrides the configuration file. Exit codes: 0 stopped by a signal, "
        "1 failure, 2 usage, 77 permission, 78 configuration. Mounts outlive the daemon; the next one adopts them.",
    )
    default = config.Config()
    parser.add_argument("--socket", help=f"API socket (default: {default.socket})")
    parser.add_argument("--run-dir", help="mounts and their workers (default: beside the socket)")
    parser.add_argument("--state-dir", help=f"cache, images, traces (default: {default.state_dir})")
    parser.add_argument("--log-level", help=f"DEBUG, INFO, WARNING or ERROR (default: {default.log_level})")
    parser.add_argument(
        "--config",
        type=Path,
        help=f"TOML file (default: ${config.FILE_VARIABLE}, else {config.SYSTEM_PATH} if it exists)",
    )
    parser.add_argument("--version", action="version", version=f"bootseerd {version('bootseer')}")
    return parser.parse_args()


def main() -> None:
    """Entry point."""
    arguments = vars(_parse_arguments())
    socket_path = Path()
    try:
        settings = config.load(arguments.pop("config"), flags=arguments)
        logging.basicConfig(
            level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        socket_path = Path(settings.socket).absolute()
        run_dir = Path(settings.run_dir or socket_path.parent).absolute()
        state_dir = Path(settings.state_dir).absolute()
        _lock(run_dir)
        supervisor = Supervisor(run_dir, state_dir, version("bootseer"))
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
