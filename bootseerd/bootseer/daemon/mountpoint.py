"""The directory that a mount covers: may it be used, who made it, what is mounted on it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from bootseer import native
from bootseer.core import errors, wire
from bootseer.core.mountinfo import mounted_on

_OURS = "fuse.bootseer"


@dataclass
class Mountpoint:
    """``made``: the daemon made the directory, so it removes it in the end."""

    path: Path
    made: bool = False

    @classmethod
    def choose(cls, wanted: str | None, default: Path) -> Mountpoint:
        """From a request. The path is resolved, as the kernel shows it."""
        if wanted is None:
            return cls(default)
        if not wanted.startswith("/") or "\0" in wanted:
            raise errors.UsageError(f"mount point {wanted!r} is not absolute")
        try:
            return cls(Path(wanted).resolve())
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
            raise errors.UsageError(f"cannot mount on {wanted}: {error}") from None

    @classmethod
    def of(cls, spec: wire.WorkerSpec) -> Mountpoint:
        """Of a mount that exists."""
        return cls(Path(spec.mount.fuse_mountpoint), spec.made_mountpoint)

    def prepare(self) -> None:
        """Make the directory, or check that it is empty and nothing is mounted on it."""
        if mounted_on(self.path) is not None:
            raise errors.UsageError(f"something is mounted on {self.path} already")
        try:
            try:
                self.path.mkdir(parents=True)
                self.made = True
            except FileExistsError:
                if any(self.path.iterdir()):
                    raise errors.UsageError(
                        f"{self.path} is not empty", hint="a mount would hide what is in it"
                    ) from None
        except OSError as error:
            raise errors.UsageError(f"cannot mount on {self.path}: {error.strerror}") from None

    def detach(self) -> None:
        """Unmount lazily what a dead worker of ours left here; a mount of somebody else stays."""
        entry = mounted_on(self.path)
        if entry is not None and entry.file_system == _OURS:
            with contextlib.suppress(OSError):
                native.umount(str(self.path), lazy=True)

    def remove(self) -> None:
        """Remove the directory if we made it and nothing uses it."""
        if self.made:
            with contextlib.suppress(OSError):
                self.path.rmdir()
