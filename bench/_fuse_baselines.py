"""The serving processes that ``bench.fuse_read`` compares.

Run as ``python -m bench._fuse_baselines SPEC`` with a JSON object: ``kind``, ``mountpoint``, ``path``. Prints
``ready`` once the file ``data`` in the mount can be read, serves until its standard input ends, and obeys the
lines ``busy`` and ``idle`` on it (a Python thread that computes, or not).

Kinds: ``pyfuse3`` answers from memory, ``pyfuse3_thread`` in a worker thread, as a file system has to whose
reads may block; ``session`` is ours with a complete BlockFile; ``passthrough`` is ours with a local file that
the kernel reads itself.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import pyfuse3
import trio

from bootseer.native import _core

_INODE = 2


class FileOperations(pyfuse3.Operations):
    """A root directory with the one file ``data``."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        self.size_bytes = size_bytes

    def _attributes(self, inode: int) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_nlink = 1
        entry.entry_timeout = entry.attr_timeout = 3600
        if inode == pyfuse3.ROOT_INODE:
            entry.st_mode = stat.S_IFDIR | 0o755
        else:
            entry.st_mode = stat.S_IFREG | 0o444
            entry.st_size = self.size_bytes
        return entry

    async def lookup(self, parent_inode: int, name: bytes, ctx: object = None) -> pyfuse3.EntryAttributes:
        if name != b"data":
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self._attributes(_INODE)

    async def getattr(self, inode: int, ctx: object = None) -> pyfuse3.EntryAttributes:
        return self._attributes(inode)

    async def open(self, inode: int, flags: int, ctx: object) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=inode)


class MemoryOperations(FileOperations):
    """Reads are slices of memory: the least that a pyfuse3 file system can do."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.stat().st_size)
        self.view = memoryview(path.read_bytes())

    async def read(self, fh: int, off: int, size: int) -> bytes:
        # pyfuse3 takes any buffer, though it declares bytes; a slice of bytes would be a copy.
        return cast(bytes, self.view[off : off + size])


class ThreadOperations(FileOperations):
    """Reads run in a worker thread."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.stat().st_size)
        self.descriptor = os.open(path, os.O_RDONLY)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        return await trio.to_thread.run_sync(os.pread, self.descriptor, size, off)


class BusyLoop:
    """A thread of pure Python computation that can be switched on and off."""

    def __init__(self) -> None:
        self._running = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        total = 0
        while True:
            self._running.wait()
            for number in range(100_000):
                total += number * number % 7

    def obey(self, command: str) -> None:
        """``busy`` or ``idle``."""
        if command == "busy":
            self._running.set()
        elif command == "idle":
            self._running.clear()


async def _serve() -> None:
    """Serve until standard input ends."""
    loop = BusyLoop()
    async with trio.open_nursery() as nursery:

        async def obey() -> None:
            stream = trio.lowlevel.FdStream(os.dup(0))
            async for data in stream:
                for line in data.decode().splitlines():
                    loop.obey(line)
                    print(line, flush=True)
            pyfuse3.terminate()

        nursery.start_soon(obey)
        print("ready", flush=True)
        await pyfuse3.main()
        nursery.cancel_scope.cancel()


def _serve_plain(operations: FileOperations, mountpoint: Path) -> None:
    options = set(pyfuse3.default_options) | {"fsname=bench"}
    pyfuse3.init(operations, str(mountpoint), options)
    try:
        trio.run(_serve)
    finally:
        pyfuse3.close()


def _cached_block_file(path: Path, cache_directory: Path) -> _core.BlockFile:
    """The file as stored chunks of 256 KiB, all of them in a cache."""
    chunk_bytes = 256 << 10
    contents = path.read_bytes()
    entries = []
    for offset in range(0, len(contents), chunk_bytes):
        chunk = contents[offset : offset + chunk_bytes]
        entries.append((offset, len(chunk), offset, len(chunk), hashlib.sha256(chunk).digest()))
    digest = hashlib.sha256(contents)
    chunk_map = _core.ChunkMap(len(contents), 0, len(contents), digest.digest(), entries)
    cache = _core.Cache(str(cache_directory))
    file = _core.BlockFile(cache, digest.hexdigest(), chunk_map, _core.open_source(str(path)), record=False)
    file.prefetch([(index, index) for index in range(len(entries))])
    deadline = time.monotonic() + 60
    while not file.is_complete():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the cache does not fill: {file.statistics()}")
        time.sleep(0.01)
    return file


def _serve_session(file: _core.ReadFile, mountpoint: Path, *, passthrough: bool) -> None:
    session = _core.Session.mount(str(mountpoint), passthrough=passthrough)
    try:
        session.add_file(_INODE, file)
        operations = FileOperations(file.size_bytes)
        pyfuse3.init(operations, f"/dev/fd/{session.control_fd}", set())
        session.start()
        trio.run(_serve)
    finally:
        subprocess.run(["umount", "-l", str(mountpoint)], check=True)
        session.stop()
        pyfuse3.close(unmount=False)


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    path, mountpoint = Path(spec["path"]), Path(spec["mountpoint"])
    match spec["kind"]:
        case "pyfuse3":
            _serve_plain(MemoryOperations(path), mountpoint)
        case "pyfuse3_thread":
            _serve_plain(ThreadOperations(path), mountpoint)
        case "session":
            cached = _cached_block_file(path, mountpoint.with_name("cache"))
            _serve_session(cached, mountpoint, passthrough=False)
        case "passthrough":
            _serve_session(_core.LocalFile(str(path), passthrough=True), mountpoint, passthrough=True)


if __name__ == "__main__":
    main()
