"""What verbs print: the result on stdout, progress and errors on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from bootseer.core.errors import BootseerError

JSON_VERSION = 1


def emit_json(value: object) -> None:
    """One JSON document; records become objects. Keys are stable within ``JSON_VERSION``."""
    json.dump(msgspec.to_builtins(value), sys.stdout, indent=2)
    sys.stdout.write("\n")


def emit(line: str) -> None:
    """One line of the result."""
    sys.stdout.write(line + "\n")


def say(line: str) -> None:
    """One line beside the result."""
    sys.stderr.write(f"bootseer: {line}\n")
    sys.stderr.flush()


def fail(error: BootseerError) -> int:
    """Print an error as one line; returns its exit code."""
    message = " ".join(str(error.message).split())
    say(f"{message} ({error.hint})" if error.hint else message)
    return error.exit_code


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Aligned columns."""
    lines = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        emit("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def size(count_bytes: float) -> str:
    """Bytes for people, decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count_bytes < 1000:
            return f"{count_bytes:.0f} {unit}" if unit == "B" else f"{count_bytes:.1f} {unit}"
        count_bytes /= 1000
    return f"{count_bytes:.1f} TB"


def fields(pairs: Iterable[tuple[str, Any]]) -> None:
    """``name: value`` lines, aligned."""
    items = list(pairs)
    width = max((len(name) for name, _ in items), default=0)
    for name, value in items:
        emit(f"{name.ljust(width)}  {value}")
