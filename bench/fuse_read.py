"""``make bench NAME=fuse_read``: cached blocks read through FUSE, ours against plain pyfuse3, in one run.

Four reader processes (loops in C++, never the bottleneck) read one mount at a time; all mounts exist
throughout, and every round measures all of them in small slices, in turn. A figure is the ratio of two
measurements of the same round:

- ``rand4k_over_pyfuse3``: 4 KiB random direct reads per second, session / pyfuse3 that answers from memory
- ``rand4k_over_pyfuse3_thread``: the same, session / pyfuse3 that answers from a worker thread
- ``rand4k_busy_over_idle``: the same, session with a computing Python thread in its process / without
- ``seq1m_over_pyfuse3``: 1 MiB sequential direct reads, bytes per second, session / pyfuse3 from memory
- ``passthrough_over_local``: 4 KiB random buffered reads per second, through passthrough / of the file itself
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench._report import report

_FILE_BYTES = 256 << 20
_READERS = 4
_ROUNDS = 5
_PASSES = 4  # per round, forwards and backwards in turn, so that a drift of the machine's load cancels out
_SLICE_S = 0.25
_READER = """
import json, sys
from bootseer.native import _core
print("ready", flush=True)
for line in sys.stdin:
    print(json.dumps(_core._read_loop(**json.loads(line))), flush=True)
"""


class Child:
    """A process that answers a line with a line."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def receive(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args!r} ended")
        return line.strip()

    def obey(self, command: str) -> None:
        self.send(command)
        if self.receive() != command:
            raise RuntimeError(f"{self.process.args!r} does not obey")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


@contextlib.contextmanager
def _child(command: list[str]) -> Iterator[Child]:
    child = Child(command)
    try:
        assert child.receive() == "ready"
        yield child
    finally:
        child.close()


def _measure(readers: list[Child], path: Path, *, direct: bool, random: bool, block_bytes: int) -> float:
    """Blocks per second of all readers together."""
    for seed, reader in enumerate(readers):
        reader.send(
            json.dumps(
                {
                    "path": str(path),
                    "direct": direct,
                    "random": random,
                    "block_bytes": block_bytes,
                    "duration_s": _SLICE_S,
                    "seed": seed + 1,
                }
            )
        )
    results: list[tuple[int, int, float]] = [json.loads(reader.receive()) for reader in readers]
    return sum(reads / elapsed_s for reads, _, elapsed_s in results)


def _round(readers: list[Child], servers: dict[str, Child], paths: dict[str, Path]) -> dict[str, float]:
    def busy() -> float:
        servers["session"].obey("busy")
        rate = _measure(readers, paths["session"], **small)
        servers["session"].obey("idle")
        return rate

    small: dict[str, Any] = {"direct": True, "random": True, "block_bytes": 4096}
    large: dict[str, Any] = {"direct": True, "random": False, "block_bytes": 1 << 20}
    cached: dict[str, Any] = {"direct": False, "random": True, "block_bytes": 4096}
    steps: dict[str, Callable[[], float]] = {
        "4K pyfuse3": lambda: _measure(readers, paths["pyfuse3"], **small),
        "4K session": lambda: _measure(readers, paths["session"], **small),
        "4K busy": busy,
        "4K thread": lambda: _measure(readers, paths["pyfuse3_thread"], **small),
        "1M pyfuse3": lambda: _measure(readers, paths["pyfuse3"], **large),
        "1M session": lambda: _measure(readers, paths["session"], **large),
        "buffered local": lambda: _measure(readers, paths["local"], **cached),
        "buffered passthrough": lambda: _measure(readers, paths["passthrough"], **cached),
    }
    rates = dict.fromkeys(steps, 0.0)
    for number in range(_PASSES):
        for name in steps if number % 2 == 0 else reversed(steps):
            rates[name] += steps[name]() / _PASSES
    print("  " + ", ".join(f"{name} {rate / 1e3:.3g} k/s" for name, rate in rates.items()), file=sys.stderr)
    return {
        "rand4k_over_pyfuse3": rates["4K session"] / rates["4K pyfuse3"],
        "rand4k_over_pyfuse3_thread": rates["4K session"] / rates["4K thread"],
        "rand4k_busy_over_idle": rates["4K busy"] / rates["4K session"],
        "seq1m_over_pyfuse3": rates["1M session"] / rates["1M pyfuse3"],
        "passthrough_over_local": rates["buffered passthrough"] / rates["buffered local"],
    }


def main() -> None:
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="bootseer-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        local = folder / "local"
        with local.open("wb") as file:
            for _ in range(_FILE_BYTES >> 20):
                file.write(os.urandom(1 << 20))
        paths = {"local": local}
        servers = {}
        for kind in ("pyfuse3", "pyfuse3_thread", "session", "passthrough"):
            mountpoint = folder / kind
            mountpoint.mkdir()
            spec = json.dumps({"kind": kind, "mountpoint": str(mountpoint), "path": str(local)})
            command = [sys.executable, "-m", "bench._fuse_baselines", spec]
            servers[kind] = stack.enter_context(_child(command))
            paths[kind] = mountpoint / "data"
            if paths[kind].read_bytes() != local.read_bytes():
                raise RuntimeError(f"{kind} serves wrong bytes")
        readers = [stack.enter_context(_child([sys.executable, "-c", _READER])) for _ in range(_READERS)]
        for index in range(_ROUNDS):
            print(f"round {index + 1} of {_ROUNDS}", file=sys.stderr, flush=True)
            rounds.append(_round(readers, servers, paths))
    report("fuse_read", {key: [figures[key] for figures in rounds] for key in rounds[0]})


if __name__ == "__main__":
    main()
