"""A link with a bandwidth and a round trip: network namespace, veth pair, token bucket, origin behind it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Link:
    """What the origin sits behind."""

    bits_per_s: int
    rtt_s: float

    @property
    def bytes_per_s(self) -> float:
        """Nominal bandwidth, headers included: no start can be faster than this."""
        return self.bits_per_s / 8

    @property
    def name(self) -> str:
        """For tables and figure keys, like ``1000mbit_2ms``."""
        return f"{self.bits_per_s // 1_000_000}mbit_{self.rtt_s * 1000:.0f}ms"


@contextmanager
def origin_behind(link: Link, directory: Path) -> Iterator[str]:
    """Serve ``directory`` from a namespace of its own behind ``link``; yields the base URL."""
    if os.geteuid() != 0:
        sys.exit("bench: a network namespace needs root")
    # Interface names have 15 characters at most; the pid keeps concurrent benches apart.
    tag = f"{os.getpid() % 100_000}"
    namespace, outside, inside = f"bsr-{tag}", f"bsro{tag}", f"bsri{tag}"
    subnet = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
    _ip("netns", "add", namespace)
    try:
        _ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", namespace)
        _ip("addr", "add", f"{subnet}.1/30", "dev", outside)
        _ip("link", "set", outside, "up")
        _ip("-n", namespace, "addr", "add", f"{subnet}.2/30", "dev", inside)
        _ip("-n", namespace, "link", "set", inside, "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        rate = ("rate", f"{link.bits_per_s}bit", "burst", "256kb", "latency", "100ms")
        _run("ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", inside, "root", "tbf", *rate)
        _run("tc", "qdisc", "add", "dev", outside, "root", "tbf", *rate)
        command = [sys.executable, "-m", "bench._origin", str(directory), "--address", f"{subnet}.2"]
        command += ["--rtt-ms", str(link.rtt_s * 1000)]
        with subprocess.Popen(
            ["ip", "netns", "exec", namespace, *command], stdout=subprocess.PIPE, text=True
        ) as origin:
            try:
                assert origin.stdout is not None
                yield f"http://{subnet}.2:{int(origin.stdout.readline())}"
            finally:
                origin.kill()
    finally:
        _ip("netns", "del", namespace)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
