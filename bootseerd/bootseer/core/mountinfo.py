"""The kernel's table of mounts, proc_pid_mountinfo(5).

Parsed as bytes: other people's mount points need not be UTF-8, and may hold whatever ``str.splitlines()`` takes for the
end of a line. Paths come out as ``os.fsdecode`` makes them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MountEntry:
    """One line: where it is mounted, what kind of file system, from what."""

    path: str
    file_system: str
    source: str


def mount_table(table: bytes | None = None) -> list[MountEntry]:
    """All mounts of this process's namespace (or of ``table``), in the order of mounting."""
    entries = []
    for line in (Path("/proc/self/mountinfo").read_bytes() if table is None else table).split(b"\n"):
        # The fifth field is the path; after the dash come type and source.
        fields, dash, rest = line.partition(b" - ")
        if dash:
            file_system, source, *_ = rest.split(b" ")
            entries.append(MountEntry(*map(_decode, (fields.split(b" ")[4], file_system, source))))
    return entries


def mounted_on(path: Path | str, table: bytes | None = None) -> MountEntry | None:
    """What is mounted on a directory, topmost; ``None`` when nothing is."""
    found = [entry for entry in mount_table(table) if entry.path == str(path)]
    return found[-1] if found else None


def _decode(field: bytes) -> str:
    """The kernel writes blanks, tabs, newlines and backslashes as ``\\ooo``."""
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field))
