"""Recorded traces of images: ``state_dir/traces/<manifest digest>/<time>-<mount>.trace``."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from bootseer import native
from bootseer.core.errors import IntegrityError

log = logging.getLogger(__name__)

KEEP = 10  # recordings kept an image
MERGED = 3  # recordings that a plan is made from: the union of three misses next to nothing
_BEGINNING_S = 60.0  # a file this young may be without its header yet
_SUFFIX = ".trace"


class TraceStore:
    """All traces of a node."""

    def __init__(self, state_dir: Path) -> None:
        self._root = state_dir / "traces"

    def recording_path(self, manifest_digest: str, mount_id: str) -> Path:
        """Where a new recording goes; the oldest beyond :data:`KEEP` are dropped."""
        directory = self._directory(manifest_digest)
        directory.mkdir(parents=True, exist_ok=True)
        for old in self.paths(manifest_digest)[: -KEEP + 1]:
            old.unlink(missing_ok=True)
        return directory / f"{time.time_ns():020d}-{mount_id}{_SUFFIX}"

    def recordings(self, manifest_digest: str) -> list[native.Trace]:
        """The last :data:`MERGED` readable recordings that hold anything, oldest first.

        A damaged one is removed, once it is certain that nobody is just beginning it.
        """
        found: list[native.Trace] = []
        for path in reversed(self.paths(manifest_digest)):
            try:
                trace = native.Trace.load(str(path))
            except FileNotFoundError:  # dropped by another mount as one of the oldest
                continue
            except OSError as error:
                log.warning("trace %s is left out: %s", path.name, error)
                continue
            except IntegrityError as error:
                self._drop(path, error)
                continue
            if trace.records():
                found.insert(0, trace)
            if len(found) == MERGED:
                break
        return found

    @staticmethod
    def _drop(path: Path, why: IntegrityError) -> None:
        try:
            if time.time() - path.stat().st_mtime < _BEGINNING_S:
                return
            path.unlink()
        except OSError as error:
            log.warning("trace %s is damaged and cannot be removed: %s", path.name, error)
        else:
            log.warning("trace %s dropped: %s", path.name, why)

    def merged(self, manifest_digest: str) -> native.Trace | None:
        """The union of the last recordings, earliest first use of each block; ``None`` when there is none."""
        traces = self.recordings(manifest_digest)
        return native.Trace.merge(traces) if traces else None

    def plan(self, manifest_digest: str, chunk_map: native.ChunkMap) -> list[tuple[int, int]]:
        """(chunk, first use in ns) in first-use order; empty without recordings."""
        trace = self.merged(manifest_digest)
        return trace.plan(chunk_map) if trace is not None else []

    def digests(self) -> list[str]:
        """Images that have recordings."""
        if not self._root.exists():
            return []
        return sorted(f"sha256:{path.name}" for path in self._root.iterdir() if path.is_dir())

    def _directory(self, manifest_digest: str) -> Path:
        return self._root / manifest_digest.removeprefix("sha256:")

    def paths(self, manifest_digest: str) -> list[Path]:
        """The files of an image's recordings, oldest first."""
        return sorted(self._directory(manifest_digest).glob(f"*{_SUFFIX}"))
