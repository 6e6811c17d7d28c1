"""Starts and questions the processes of ``_reader.py``."""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests._node import wait_until
from tests.daemon._reader import LAYOUT

_SCRIPT = Path(__file__).with_name("_reader.py")


class Readers:
    """Four processes: two with O_DIRECT, two through the page cache, which they drop before each read."""

    def __init__(self, directory: Path, path: str, truth: bytes) -> None:
        truth_path = directory / "truth"
        truth_path.write_bytes(truth)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.counters: list[mmap.mmap] = []
        for index, mode in enumerate(["direct", "buffered", "direct", "buffered"]):
            counters_path = directory / f"counters{index}"
            counters_path.write_bytes(bytes(LAYOUT.size))
            with counters_path.open("r+b") as file:
                self.counters.append(mmap.mmap(file.fileno(), LAYOUT.size))
            argv = [sys.executable, str(_SCRIPT), path, str(truth_path), str(counters_path), mode, str(index)]
            self.processes.append(subprocess.Popen(argv))

    def counts(self) -> list[tuple[int, int, int]]:
        """(reads, wrong, failed) of each."""
        return [LAYOUT.unpack(counters[:])[:3] for counters in self.counters]

    def wait_progress(self, reads: int = 3, timeout_s: float = 30.0) -> None:
        """Until each has done so many reads more."""
        before = [count for count, _, _ in self.counts()]

        def progressed() -> bool:
            now = [count for count, _, _ in self.counts()]
            return all(new - old >= reads for new, old in zip(now, before, strict=True))

        wait_until(progressed, "every reader goes on", timeout_s)

    def finish(self) -> None:
        """Stop them and check: none wrong, none failed, none stuck."""
        for counters in self.counters:
            counters[24] = 1
        for process in self.processes:
            assert process.wait(30) == 0
        assert all(reads > 0 and wrong == failed == 0 for reads, wrong, failed in self.counts()), (
            self.counts()
        )

    def close(self) -> None:
        """End them, however they are."""
        for process in self.processes:
            process.kill()
            process.wait()
        for counters in self.counters:
            counters.close()


@contextmanager
def reading(directory: Path, path: str, truth: bytes) -> Iterator[Readers]:
    """Readers that have begun; the end checks them."""
    readers = Readers(directory, path, truth)
    try:
        readers.wait_progress()
        yield readers
        readers.finish()
    finally:
        readers.close()
