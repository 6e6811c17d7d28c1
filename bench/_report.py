"""What every bench prints: one JSON object as its last line.

``{"bench": name, "figures": {key: {"median", "min", "max", "runs"}}, "machine": {…}}``. A figure is the
median of its runs; ``min`` and ``max`` are its spread, ``runs`` the single values in the order taken.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
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
        "python": platform.python_version(),
    }


def _significant(value: float) -> float:
    return float(f"{value:.4g}")


def _field(path: Path, name: str) -> str:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"
