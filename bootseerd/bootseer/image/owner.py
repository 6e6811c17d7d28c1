"""Which process something belongs to, so that what a killed one left can be told from what is in use."""

from __future__ import annotations

import os
from pathlib import Path


def owner(pid: int | None = None) -> str:
    """A process, told from a later one with the same number by its start (clock ticks since boot).

    Also by its pid namespace, since in another one the number means nothing.
    """
    pid = pid or os.getpid()
    return f"{pid}:{_started(pid)}:{_namespace()}"


def owner_is_gone(text: str) -> bool:
    """Whether the process that :func:`owner` named has ended; of what cannot be judged here, that it has not."""
    pid, _, rest = text.partition(":")
    started, _, namespace = rest.partition(":")
    if not pid.isdecimal() or not started.isdecimal() or namespace != _namespace():
        return False
    return _started(int(pid)) != started


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").stat().st_ino)


def _started(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]  # proc_pid_stat(5), field 22
