"""A real bootseerd with directories of its own, for tests that mount, kill and look."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.native.origin import Image

from bootseer.cli.client import Client
from bootseer.core import wire
from bootseer.core.mountinfo import mount_table
from bootseer.image import layout

_MNT_DETACH = 2


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    """Poll with a deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.005)


def mounted() -> list[Path]:
    """All mount points of this namespace, in the order of mounting."""
    return [Path(entry.path) for entry in mount_table()]


def detach(mountpoint: Path) -> None:
    """Lazy unmount; nothing happens when nothing is mounted there."""
    ctypes.CDLL(None).umount2(os.fsencode(mountpoint), _MNT_DETACH)


def kill(pid: int) -> None:
    """SIGKILL to a process that may have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Node:
    """One daemon after the other on the same directories. All paths are short (unix sockets: 107 bytes)."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="bsr-", dir="/tmp"))
        self.run_dir = self.root / "run"
        self.state_dir = self.root / "state"
        self.socket_path = self.run_dir / "d.sock"
        self.log_path = self.root / "daemon.log"
        self.daemon: subprocess.Popen[bytes] | None = None
        self.client = Client(self.socket_path, timeout_s=60.0)

    def command(self, *options: str) -> list[str]:
        """The command line of a daemon of this node."""
        places = {"--socket": self.socket_path, "--run-dir": self.run_dir, "--state-dir": self.state_dir}
        flat = [str(word) for pair in places.items() for word in pair]
        return [sys.executable, "-m", "bootseer.daemon.main", *flat, *options]

    def start(self) -> None:
        """Start a daemon and wait until it answers."""
        assert self.daemon is None
        with self.log_path.open("ab") as log:
            self.daemon = subprocess.Popen(self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(self._answers, "the daemon answers")

    def _answers(self) -> bool:
        assert self.daemon is not None
        assert self.daemon.poll() is None, self.log()
        try:
            return self.client.status().pid == self.daemon.pid
        except Exception:
            return False

    def end(self, number: int = signal.SIGTERM) -> int:
        """End the daemon with a signal; returns its exit status."""
        assert self.daemon is not None
        self.daemon.send_signal(number)
        status = self.daemon.wait(20)
        self.daemon = None
        return status

    def log(self) -> str:
        """What all daemons and workers of this node said."""
        worker_log = self.run_dir / "worker.log"
        texts = [path.read_text() for path in (self.log_path, worker_log) if path.exists()]
        return "\n".join(texts)

    def workers(self) -> list[int]:
        """Living worker processes, spares too: those that log to this node's ``worker.log``."""
        found = []
        for process in Path("/proc").iterdir():
            if not process.name.isdigit():
                continue
            try:
                log = (process / "fd/1").readlink()
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if log == self.run_dir / "worker.log" and state != "Z":
                found.append(int(process.name))
        return found

    def mounts(self) -> list[Path]:
        """Mounts below this node's directory."""
        return [path for path in mounted() if path.is_relative_to(self.root)]

    def mount(self, reference: object, mountpoint: Path | None = None, **options: Any) -> wire.Mount:
        """Mount; without background traffic and recording unless asked for."""
        quiet = {"background_fill": False, "record": False, "prefetch": False}
        target = None if mountpoint is None else str(mountpoint)
        request = wire.MountRequest(image=str(reference), mountpoint=target, **quiet | options)
        return self.client.mount(request)

    def cleanup(self) -> None:
        """End everything that is left, by pid."""
        if self.daemon is not None:
            self.daemon.kill()
            self.daemon.wait()
        for mountpoint in reversed(self.mounts()):
            detach(mountpoint)
        for pid in self.workers():
            kill(pid)
        wait_until(lambda: not self.workers(), "all workers are gone")
        shutil.rmtree(self.root)


def write_layout(root: Path, image: Image, *, chunk_map: bytes | None = None) -> Path:
    """An OCI layout with ``image`` under the tag ``latest``; its raw bytes need not be a file system."""
    writer = layout.LayoutWriter(root)
    with writer.temporary() as blob:
        blob.write_bytes(image.blob)
        chunks = writer.adopt(layout.CHUNKS_TYPE, blob, f"sha256:{image.key}")
    manifest = {
        "schemaVersion": 2,
        "mediaType": layout.MANIFEST_TYPE,
        "artifactType": layout.ARTIFACT_TYPE,
        "config": writer.add_bytes(layout.CONFIG_TYPE, b'{"config": {"Cmd": ["/bin/true"]}}'),
        "layers": [
            writer.add_bytes(
                layout.CHUNK_MAP_TYPE, image.map.serialize() if chunk_map is None else chunk_map
            ),
            chunks,
        ],
        "annotations": {layout.FORMAT_ANNOTATION: layout.FORMAT},
    }
    descriptor = writer.add_bytes(layout.MANIFEST_TYPE, wire.encode(manifest))
    writer.tag(descriptor, "latest")
    return root
