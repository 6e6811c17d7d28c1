"""A node of our own for a bench: a ``bootseerd`` with its own socket, run and state directory, and its CLI."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Node:
    """Handle of a running daemon."""

    socket: Path
    state_dir: Path

    def command(self, *arguments: str) -> list[str]:
        """The command line of one CLI verb against this node."""
        return [str(_BIN / "bootseer"), "--socket", str(self.socket), *arguments]

    def json(self, *arguments: str) -> Any:
        """Run a CLI verb and parse what it printed."""
        return json.loads(subprocess.run(self.command(*arguments), check=True, stdout=subprocess.PIPE).stdout)

    def wait_idle(self, timeout_s: float = 30.0) -> None:
        """Wait until no mount is left, so that one trial does not run into the next."""
        deadline = time.monotonic() + timeout_s
        while self.json("status", "--json")["mounts"]:
            if time.monotonic() > deadline:
                raise TimeoutError("a mount of the previous trial is still there")
            time.sleep(0.05)


@contextmanager
def node(directory: Path) -> Iterator[Node]:
    """Run a daemon whose state lives under ``directory`` (which survives, so that it can be started again)."""
    directory.mkdir(parents=True, exist_ok=True)
    handle = Node(socket=directory / "bootseerd.sock", state_dir=directory / "state")
    command = [str(_BIN / "bootseerd"), "--socket", str(handle.socket)]
    command += ["--run-dir", str(directory / "run"), "--state-dir", str(handle.state_dir)]
    with (directory / "bootseerd.log").open("ab") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        _wait_until_up(handle, daemon, directory)
        yield handle
    finally:
        if daemon.poll() is None:
            os.kill(daemon.pid, signal.SIGTERM)
            daemon.wait(timeout=20)


def _wait_until_up(handle: Node, daemon: subprocess.Popen[bytes], directory: Path) -> None:
    deadline = time.monotonic() + 20
    while True:
        probe = subprocess.run(handle.command("status", "--json"), capture_output=True, check=False)
        if probe.returncode == 0 and json.loads(probe.stdout).get("spare_ready", True):
            return
        if daemon.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"bench: bootseerd did not come up, see {directory / 'bootseerd.log'}")
        time.sleep(0.05)
