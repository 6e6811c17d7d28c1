"""A process that serves local files through a Session and pyfuse3; tests start, question and kill it.

Its only argument is a JSON object: ``mountpoint``, ``files`` (name → path of a local file), ``options``
(keyword arguments of ``Session.mount`` or ``Session.resume``), ``resume_fd`` (a /dev/fuse descriptor or
null), ``channel_fd`` (a connected unix socket). It sends one JSON line with the device descriptor attached,
then answers each line it gets with one line.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import pyfuse3
import trio

from bootseer.native import _core

_FIRST_INODE = 10
PYTHON_INODE = 5
PYTHON_NAME = b"from-python"
PYTHON_BYTES = bytes(range(256)) * 4096 * 3


class Operations(pyfuse3.Operations):
    """A root directory with the given files and one whose bytes come from Python."""

    def __init__(self, session: Any, files: dict[str, Any], direct_io: bool) -> None:
        super().__init__()
        self.session = session
        self.files = {name.encode(): (_FIRST_INODE + i, file) for i, (name, file) in enumerate(files.items())}
        self.by_inode = {inode: file for inode, file in self.files.values()}
        self.direct_io = direct_io
        self.counts = {"lookup": 0, "read": 0, "open": 0, "forget": 0, "release": 0}

    def _attributes(self, inode: int) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_nlink = 1
        if inode == pyfuse3.ROOT_INODE:
            entry.st_mode = stat.S_IFDIR | 0o755
            return entry
        entry.st_mode = stat.S_IFREG | 0o444
        if inode == PYTHON_INODE:
            entry.st_size = len(PYTHON_BYTES)
        elif inode in self.by_inode:
            entry.st_size = self.by_inode[inode].size_bytes
        else:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return entry

    async def lookup(self, parent_inode: int, name: bytes, ctx: object = None) -> pyfuse3.EntryAttributes:
        self.counts["lookup"] += 1
        if name == PYTHON_NAME:
            return self._attributes(PYTHON_INODE)
        if name not in self.files:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self._attributes(self.files[name][0])

    async def getattr(self, inode: int, ctx: object = None) -> pyfuse3.EntryAttributes:
        return self._attributes(inode)

    async def open(self, inode: int, flags: int, ctx: object) -> pyfuse3.FileInfo:
        self.counts["open"] += 1
        if self.direct_io:
            return pyfuse3.FileInfo(fh=inode, direct_io=True)
        return pyfuse3.FileInfo(fh=inode, keep_cache=True)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        self.counts["read"] += 1
        if fh != PYTHON_INODE:
            raise pyfuse3.FUSEError(errno.EBADF)
        return PYTHON_BYTES[off : off + size]

    async def release(self, fh: int) -> None:
        self.counts["release"] += 1

    async def forget(self, inode_list: object) -> None:
        self.counts["forget"] += 1

    async def opendir(self, inode: int, ctx: object) -> int:
        return inode

    async def readdir(self, fh: int, start_id: int, token: Any) -> None:
        for index, (name, (inode, _)) in enumerate(self.files.items()):
            if index >= start_id and not pyfuse3.readdir_reply(
                token, name, self._attributes(inode), index + 1
            ):
                break


async def _answer_questions(channel: trio.socket.SocketType, session: Any, operations: Operations) -> None:
    buffer = b""
    while True:
        data = await channel.recv(65536)
        if not data:
            return
        buffer += data
        while b"\n" in buffer:
            line, buffer = buffer.split(b"\n", 1)
            question = line.decode()
            reply: Any
            if question == "info":
                reply = session.info()
            elif question == "statistics":
                reply = session.statistics() | operations.counts
            elif question.startswith("remove "):
                session.remove_file(int(question.split()[1]))
                reply = "removed"
            elif question == "stop":
                pyfuse3.terminate()
                return
            else:
                reply = f"unknown question {question}"
            await channel.send(json.dumps(reply).encode() + b"\n")


async def _run(session: Any, operations: Operations, channel: socket.socket) -> None:
    async with trio.open_nursery() as nursery:

        async def terminate_when_unmounted() -> None:
            await trio.lowlevel.wait_readable(session.ended_fd)
            pyfuse3.terminate()

        nursery.start_soon(_answer_questions, trio.socket.from_stdlib_socket(channel), session, operations)
        nursery.start_soon(terminate_when_unmounted)
        await pyfuse3.main()
        nursery.cancel_scope.cancel()


def main() -> None:
    spec = json.loads(sys.argv[1])
    channel = socket.socket(fileno=spec["channel_fd"])
    passthrough = spec.get("offer_passthrough", False)
    files: dict[str, Any] = {
        name: _core.LocalFile(path, passthrough=passthrough) for name, path in spec["files"].items()
    }
    for name in spec.get("slow_files", []):
        files[name] = _core._SlowFile(files[name], spec["slow_s"])
    if spec.get("resume_fd") is None:
        session = _core.Session.mount(spec["mountpoint"], **spec["options"])
    else:
        session = _core.Session.resume(spec["resume_fd"], mountpoint=spec["mountpoint"], **spec["options"])
    operations = Operations(session, files, spec.get("direct_io", False))
    for inode, file in operations.by_inode.items():
        session.add_file(inode, file)
    pyfuse3.init(operations, f"/dev/fd/{session.control_fd}", {"fsname=test"})
    session.start()
    pid_line = json.dumps({"pid": os.getpid(), "cwd": str(Path.cwd())}).encode() + b"\n"
    socket.send_fds(channel, [pid_line], [session.device_fd])
    try:
        trio.run(_run, session, operations, channel)
    finally:
        session.stop()
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main()
