"""A process that reads random pieces of a file and compares them.

Arguments: FILE TRUTH COUNTERS MODE SEED.

COUNTERS is a file of four uint64 that both sides map: reads, wrong ones, failed ones, and whether to stop.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
import sys
from pathlib import Path

PAGE = 4096
LONGEST = 256 << 10
LAYOUT = struct.Struct("=4Q")


def main() -> None:
    path, truth_path, counters_path, mode, seed = sys.argv[1:]
    truth = Path(truth_path).read_bytes()
    rng = random.Random(int(seed))
    with Path(counters_path).open("r+b") as file:
        counters = mmap.mmap(file.fileno(), LAYOUT.size)
    buffer = mmap.mmap(-1, LONGEST)  # page-aligned, as O_DIRECT wants it
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if mode == "direct" else 0))
    reads = wrong = failed = 0
    while not counters[24]:
        offset = rng.randrange(len(truth) // PAGE) * PAGE
        length = rng.randrange(1, LONGEST // PAGE + 1) * PAGE
        expected = truth[offset : offset + length]
        if mode == "buffered":
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
        try:
            got = os.preadv(fd, [memoryview(buffer)[:length]], offset)
            if buffer[:got] != expected:
                wrong += 1
        except OSError as error:
            print(f"{mode} {offset}+{length}: {error}", file=sys.stderr, flush=True)
            failed += 1
        reads += 1
        counters[:24] = LAYOUT.pack(reads, wrong, failed, 0)[:24]


if __name__ == "__main__":
    main()
