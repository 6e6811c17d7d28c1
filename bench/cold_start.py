"""How fast does a training image start? ``python -m bench.cold_start`` (root; a few minutes a link).

Until ``python3 -c "import torch"`` in a 1-2 GB image has printed, with the origin behind a rate limit and a round
trip, on a node that has nothing of the image:

- ``full``: download the layer (tar.gz), verify its digest, unpack, run: what a container engine does;
- ``lazy``: our mount, every chunk on demand, nothing recorded;
- ``record``: the same with the recorder on;
- ``prefetch``: our mount, hot chunks prefetched in first-use order from the traces of earlier starts;
- ``warm``: the hot chunks are on the node already.

The bound of a start that knows its hot chunks is ``T* = T_warm + max(0, max_i(R + C_i/B - t_i))``: R the round
trip, C_i the bytes to fetch up to chunk i in first-use order, B the bandwidth, t_i when the warm start first
needs chunk i (all from the same run). Rounds are interleaved; figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import _rootfs
from bench._network import Link, origin_behind
from bench._node import Node, node
from bench._report import report
from bootseer import native

LINKS = (Link(1_000_000_000, 0.002), Link(100_000_000, 0.020))
COMMAND = ("python3", "-c", "import torch; print('torch', torch.__version__, flush=True)")
ALTERNATIVES = {
    "full": "download, verify and unpack the layer, then run",
    "lazy": "every chunk on demand",
    "record": "the same, recording the first use of each block",
    "prefetch": "hot chunks prefetched in first-use order",
    "warm": "hot chunks already on the node",
    "bound": "T*: no start that fetches the hot chunks over this link can be faster",
}
RECORDINGS = 3  # how many starts the prefetch plan is merged from, as a node would have after three starts


@dataclass
class Times:
    """Seconds from the command line to the first output, one entry per round."""

    full: list[float] = field(default_factory=list)
    lazy: list[float] = field(default_factory=list)
    record: list[float] = field(default_factory=list)
    prefetch: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    bound: list[float] = field(default_factory=list)
    hot_bytes: int = 0


def build_origin(build_dir: Path = _rootfs.BUILD_DIR) -> Path:
    """The directory that the origin serves: our artifact (``image/``) and the layer (``layer.tar.gz``)."""
    rootfs = _rootfs.build(build_dir)
    origin = build_dir / "origin"
    image = origin / "image"
    if (
        not (image / "index.json").exists()
        or image.stat().st_mtime < (build_dir / "rootfs.stamp").stat().st_mtime
    ):
        shutil.rmtree(image, ignore_errors=True)
        origin.mkdir(exist_ok=True)
        bootseer = Path(sys.executable).parent / "bootseer"
        subprocess.run([str(bootseer), "image", "convert", str(rootfs), str(image)], check=True)
    layer = _rootfs.layer_tar(build_dir)
    served = origin / layer.name
    if not served.exists() or not served.samefile(layer):
        served.unlink(missing_ok=True)
        served.hardlink_to(layer)
    return origin


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Ratios of the pairs that were measured in one round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def time_to_output(command: list[str]) -> float:
    """Run ``command``; seconds until its first line of output. It must succeed."""
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        elapsed = time.monotonic() - start
        process.stdout.read()
    if process.returncode != 0 or not line.startswith(b"torch "):
        raise SystemExit(f"bench: {' '.join(command[:6])} … failed with {process.returncode}: {line!r}")
    return elapsed


def full_copy(url: str, directory: Path, digest: str) -> float:
    """Download, verify, unpack, run in the same runtime; seconds until the first output."""
    layer, rootfs = directory / "layer.tar.gz", directory / "rootfs"
    rootfs.mkdir()
    start = time.monotonic()
    with (
        subprocess.Popen(["curl", "-sSf", url], stdout=subprocess.PIPE) as download,
        layer.open("wb") as file,
    ):
        assert download.stdout is not None
        sha256 = hashlib.sha256()
        while block := download.stdout.read(1 << 20):
            sha256.update(block)
            file.write(block)
    if sha256.hexdigest() != digest:
        raise SystemExit("bench: the downloaded layer has another digest")
    subprocess.run(["tar", "-xzf", str(layer), "-C", str(rootfs), "--numeric-owner", "--xattrs"], check=True)
    unpacked = time.monotonic() - start
    return unpacked + time_to_output([sys.executable, "-m", "bench._run_rootfs", str(rootfs), "--", *COMMAND])


class Trials:
    """The alternatives on one link; each trial starts on a node directory of its own under ``directory``."""

    def __init__(self, link: Link, base_url: str, origin: Path, directory: Path) -> None:
        self.link = link
        self.image_url = f"{base_url}/image"
        self.layer_url = f"{base_url}/layer.tar.gz"
        self.layer_digest = hashlib.sha256((origin / "layer.tar.gz").read_bytes()).hexdigest()
        self.directory = directory
        self.traces = directory / "traces"
        self.times = Times()
        self._count = 0

    def record_traces(self) -> None:
        """What earlier starts left behind: ``RECORDINGS`` starts on a node, the first of them cold."""
        home = self._fresh("recorder")
        with node(home) as recorder:
            for _ in range(RECORDINGS):
                self._run(recorder, "--no-prefetch")
        shutil.copytree(recorder.state_dir / "traces", self.traces)
        shutil.rmtree(home)

    def round(self) -> None:
        """One trial of every alternative, interleaved; the order of lazy and record alternates."""
        times, number = self.times, len(self.times.full)
        home = self._fresh("full")
        times.full.append(full_copy(self.layer_url, home, self.layer_digest))
        shutil.rmtree(home)
        for name in ("lazy", "record") if number % 2 == 0 else ("record", "lazy"):
            flags = ["--no-prefetch"] + (["--no-record"] if name == "lazy" else [])
            home = self._fresh(name)
            with node(home) as cold:
                getattr(times, name).append(self._run(cold, *flags))
            shutil.rmtree(home)
        home = self._fresh("prefetch")
        shutil.copytree(self.traces, home / "state" / "traces")
        with node(home) as cold:
            times.prefetch.append(self._run(cold))
            started_unix_ns = time.time_ns()
            times.warm.append(self._run(cold))
            newest = max((cold.state_dir / "traces").rglob("*.trace"))
            times.bound.append(self._bound(cold, newest, started_unix_ns, times.warm[-1]))
        shutil.rmtree(home)

    def _fresh(self, name: str) -> Path:
        self._count += 1
        home = self.directory / f"{self._count:03d}-{name}"
        home.mkdir(parents=True)
        return home

    def _run(self, on: Node, *flags: str) -> float:
        elapsed = time_to_output(on.command("image", "run", *flags, self.image_url, "--", *COMMAND))
        on.wait_idle()
        return elapsed

    def _bound(self, on: Node, trace_path: Path, started_unix_ns: int, warm_s: float) -> float:
        """T* of this round; remembers the number of hot bytes."""
        trace = native.Trace.load(str(trace_path))
        chunk_map = native.ChunkMap.load(str(next((on.state_dir / "images").rglob("chunkmap"))))
        # The clock of the trace starts when the worker opens the file, ours with the command line.
        lag_s = (trace.started_unix_ns - started_unix_ns) / 1e9
        needs = [(lag_s + t_ns / 1e9, chunk_map.chunk(chunk)[3]) for chunk, t_ns in trace.plan(chunk_map)]
        self.times.hot_bytes = sum(count for _, count in needs)
        return bound_s(warm_s, needs, self.link)


def bound_s(warm_s: float, needs: Sequence[tuple[float, int]], link: Link) -> float:
    """``T_warm + max(0, max_i(R + C_i/B - t_i))`` for (t_i, bytes) in first-use order."""
    late_s, fetched_bytes = 0.0, 0
    for needed_s, count_bytes in needs:
        fetched_bytes += count_bytes
        late_s = max(late_s, link.rtt_s + fetched_bytes / link.bytes_per_s - needed_s)
    return warm_s + late_s


def figures(times: Times) -> dict[str, list[float]]:
    """The ratios that the issue names, then the times behind them."""
    return {
        "full_over_prefetch": ratios(times.full, times.prefetch),
        "prefetch_over_lazy": ratios(times.prefetch, times.lazy),
        "prefetch_over_bound": ratios(times.prefetch, times.bound),
        "record_overhead": ratios(times.record, times.lazy),
        **{f"{name}_s": getattr(times, name) for name in ALTERNATIVES},
        "hot_bytes": [times.hot_bytes],
    }


def run(links: Sequence[Link], rounds: int) -> dict[Link, Times]:
    """All rounds on all links; prints a table a link as it goes."""
    origin = build_origin()
    results = {}
    for link in links:
        with (
            tempfile.TemporaryDirectory(dir=_rootfs.BUILD_DIR, prefix="cold-start-") as directory,
            origin_behind(link, origin) as base_url,
        ):
            trials = Trials(link, base_url, origin, Path(directory))
            trials.record_traces()
            for _ in range(rounds):
                trials.round()
        results[link] = trials.times
        print_table(link, trials.times)
    return results


def print_table(link: Link, times: Times) -> None:
    """One line an alternative."""
    print(f"\n{link.bits_per_s / 1e6:.0f} Mbit/s, {link.rtt_s * 1000:.0f} ms round trip", end="")
    print(f"; {times.hot_bytes / 1e6:.0f} MB of the image are hot")
    for name, description in ALTERNATIVES.items():
        seconds = getattr(times, name)
        print(
            f"  {name:9} {statistics.median(seconds):7.2f} s  ({min(seconds):.2f}-{max(seconds):.2f})  {description}"
        )
    sys.stdout.flush()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.cold_start", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--link", choices=[link.name for link in LINKS], action="append", help="default: all")
    arguments = parser.parse_args()
    links = [link for link in LINKS if not arguments.link or link.name in arguments.link]
    results = run(links, arguments.rounds)
    first, *others = links
    merged = figures(results[first])
    for link in others:
        merged |= {f"{key}_{link.name}": value for key, value in figures(results[link]).items()}
    report("cold_start", merged)


if __name__ == "__main__":
    main()
