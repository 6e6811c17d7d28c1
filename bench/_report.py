<<<<<<< HEAD
"""What every bench prints last: one JSON object with its figures and the machine they were measured on."""
=======
"""What every bench prints: one JSON object as its last line.

``{"bench": name, "figures": {key: {"median", "min", "max", "runs"}}, "machine": {…}}``. A figure is the median of
its runs; ``min`` and ``max`` are its spread, ``runs`` the single values in the order they were taken.
"""
>>>>>>> session

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
<<<<<<< HEAD


def figure(values: Sequence[float], digits: int = 3) -> dict[str, float | int]:
    """The median of ``values`` with its spread (smallest, largest, number of runs)."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "runs": len(values),
    }


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Ratios of the pairs that were measured side by side in one round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def machine() -> dict[str, object]:
    """CPU count, memory, kernel, interpreter: enough to judge a figure, nothing that names the machine."""
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "cpus": os.cpu_count(),
        "memory_bytes": int(memory.split()[1]) * 1024,
        "kernel": platform.release(),
=======
from typing import TypedDict


class Figure(TypedDict):
    """One figure with its spread, in whatever unit its key names."""

    median: float
    min: float
    max: float
    runs: list[float]


def figure(runs: Sequence[float]) -> Figure:
    """Summarise repeated measurements of one thing."""
    rounded = [_significant(run) for run in runs]
    return {
        "median": _significant(statistics.median(runs)),
        "min": min(rounded),
        "max": max(rounded),
        "runs": rounded,
    }


def report(bench: str, figures: Mapping[str, Sequence[float]]) -> None:
    """Print the last line of a bench: ``figures`` maps each key to its repeated measurements."""
    summary = {key: figure(runs) for key, runs in figures.items()}
    print(json.dumps({"bench": bench, "figures": summary, "machine": machine()}), flush=True)


def machine() -> dict[str, str | int | float]:
    """What the figures depend on: kernel, processor, memory, load when asked."""
    return {
        "kernel": platform.release(),
        "cpu": _field(Path("/proc/cpuinfo"), "model name"),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_1min": round(os.getloadavg()[0], 2),
>>>>>>> session
        "python": platform.python_version(),
    }


<<<<<<< HEAD
def report(bench: str, figures: Mapping[str, object]) -> None:
    """Print the last line of a bench."""
    print(json.dumps({"bench": bench, "figures": dict(figures), "machine": machine()}), flush=True)
=======
def _significant(value: float) -> float:
    return float(f"{value:.4g}")


def _field(path: Path, name: str) -> str:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"
>>>>>>> session
