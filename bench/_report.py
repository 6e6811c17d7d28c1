"""What every bench prints last: one JSON object with its figures and the machine they were measured on."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path


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
        "python": platform.python_version(),
    }


def report(bench: str, figures: Mapping[str, object]) -> None:
    """Print the last line of a bench."""
    print(json.dumps({"bench": bench, "figures": dict(figures), "machine": machine()}), flush=True)
