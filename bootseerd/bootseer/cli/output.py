"""What verbs print: the result on stdout, progress and errors on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
import typer

from bootseer.core.errors import BootseerError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Reference = Annotated[str, typer.Argument(help="Layout directory or http(s) URL, with :TAG or @sha256:…")]


def absolute(reference: str) -> str:
    """A reference for the daemon, which has another working directory."""
    return reference if "://" in reference else str(Path(reference).absolute())


def emit_json(value: object) -> None:
    """One JSON document on stdout; records become objects. Keys are never renamed or removed."""
    json.dump(msgspec.to_builtins(value), sys.stdout, indent=2)
    sys.stdout.write("\n")


def emit_json_line(value: object) -> None:
    """One line of JSON on stderr, for verbs whose stdout belongs to somebody else."""
    sys.stderr.write(json.dumps(msgspec.to_builtins(value)) + "\n")
    sys.stderr.flush()


def emit(line: str) -> None:
    """One line of the result."""
    sys.stdout.write(line + "\n")


def say(line: str) -> None:
    """One line beside the result."""
    sys.stderr.write(f"bootseer: {' '.join(line.split())}\n")
    sys.stderr.flush()


def fail(error: BootseerError) -> int:
    """Print an error as one line; returns its exit code."""
    say(f"{error.message} ({error.hint})" if error.hint else error.message)
    return error.exit_code


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Aligned columns."""
    lines = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        emit("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


class Advance(Protocol):
    """Moves a progress bar on."""

    def __call__(self, more_bytes: int, stage: str | None = None, total_bytes: int | None = None) -> None: ...


@contextmanager
def progress_bar(stage: str, total_bytes: int | None) -> Iterator[Advance]:
    """A bar on stderr, only where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda more_bytes, stage=None, total_bytes=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(stage, total=total_bytes)

        def advance(more_bytes: int, stage: str | None = None, total_bytes: int | None = None) -> None:
            bar.update(task, advance=more_bytes, description=stage, total=total_bytes)

        yield advance


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
