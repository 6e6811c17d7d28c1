"""A process that reads a file over and over and compares every byte with a reference copy of it.

Arguments: path, reference path, how (``direct``, ``buffered``, ``mmap``, or ``open`` for a new open each time
and a look at the directory), seed. Stops when its standard input ends; its last line is a JSON object with
``reads``, ``wrong``, ``failed`` (a list of errnos) and ``worst_s``, the longest that one read took.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import select
import sys
import time
from pathlib import Path

_PAGE = mmap.PAGESIZE


def main() -> None:
    path, reference_path, how, seed = sys.argv[1:5]
    reference = Path(reference_path).read_bytes()
    chance = random.Random(int(seed))
    flags = os.O_RDONLY | (os.O_DIRECT if how == "direct" else 0)
    descriptor = os.open(path, flags)
    buffer = mmap.mmap(-1, 1 << 20)  # page-aligned, as O_DIRECT wants
    reads = wrong = 0
    failed: list[int] = []
    worst_s = 0.0
    print("reading", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        pages = chance.choice((1, 1, 1, 4, 32, 256))
        offset = chance.randrange(len(reference) // _PAGE) * _PAGE
        view = memoryview(buffer)[: pages * _PAGE]
        want = reference[offset : offset + len(view)]
        began = time.monotonic()
        try:
            if how == "mmap":
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                with mmap.mmap(descriptor, len(reference), prot=mmap.PROT_READ) as mapping:
                    right = mapping[offset : offset + len(view)] == want
            elif how == "open":
                with Path(path).open("rb", buffering=0) as file:
                    os.posix_fadvise(file.fileno(), offset, len(view), os.POSIX_FADV_DONTNEED)
                    got = os.preadv(file.fileno(), [view], offset)
                    right = view[:got] == want and os.fstat(file.fileno()).st_size == len(reference)
                right = right and Path(path).name in os.listdir(Path(path).parent)  # noqa: PTH208
            else:
                if how == "buffered":
                    os.posix_fadvise(descriptor, offset, len(view), os.POSIX_FADV_DONTNEED)
                got = os.preadv(descriptor, [view], offset)
                right = view[:got] == want
        except OSError as error:
            failed.append(error.errno or 0)
        else:
            wrong += not right
        worst_s = max(worst_s, time.monotonic() - began)
        reads += 1
    print(json.dumps({"reads": reads, "wrong": wrong, "failed": failed, "worst_s": worst_s}), flush=True)


if __name__ == "__main__":
    main()
