"""pyfuse3 operations over a :class:`~bootseer.fusefs.tree.Tree`: only translates.

READ of files that the session serves never arrives here. After a resume the kernel may use inodes that this process
was never asked to look up; numbers are a function of the tree, so every operation answers them without a table.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import time
from collections.abc import Sequence

import pyfuse3

from bootseer.fusefs.errno_map import to_errno
from bootseer.fusefs.tree import MAX_NAME_BYTES, Node, Tree

log = logging.getLogger(__name__)

# Names and attributes never change, so the kernel may keep them as long as it likes.
_FOREVER_S = 86_400.0
_BLOCK_BYTES = 4096


class Operations(pyfuse3.Operations):
    """A read-only file system."""

    supports_dot_lookup = True
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self._tree = tree
        self._mounted_ns = time.time_ns()
        self._snapshots: dict[int, bytes] = {}  # file handle → content at its open, for generated files
        # Above any inode, which is the handle of every other file, and above all that a predecessor on this mount
        # gave out: a reader of its snapshots must not see, or release, one of ours.
        self._handles = itertools.count(time.monotonic_ns())

    def _node(self, inode: int) -> Node:
        node = self._tree.get(inode)
        if node is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return node

    def _attributes(self, node: Node) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = node.inode
        entry.st_mode = node.mode
        entry.st_nlink = 2 if node.is_dir else 1
        entry.st_uid = entry.st_gid = 0
        entry.st_size = node.size_bytes or 0
        entry.st_blksize = _BLOCK_BYTES
        entry.st_blocks = -(-entry.st_size // 512)
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = self._mounted_ns
        entry.generation = 0
        entry.entry_timeout = entry.attr_timeout = _FOREVER_S if node.generate is None else 0.0
        return entry

    async def lookup(
        self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Find a name."""
        if len(name) > MAX_NAME_BYTES:
            raise pyfuse3.FUSEError(errno.ENAMETOOLONG)
        node = self._tree.lookup(parent_inode, name)
        if node is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self._attributes(node)

    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        """Attributes of an inode."""
        return self._attributes(self._node(inode))

    async def access(self, inode: int, mode: int, ctx: pyfuse3.RequestContext) -> bool:
        """Nothing may be written."""
        self._node(inode)
        return not mode & os.W_OK

    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        """The handle of a directory is its inode."""
        if not self._node(inode).is_dir:
            raise pyfuse3.FUSEError(errno.ENOTDIR)
        return inode

    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        """Entries from ``start_id`` on, until the kernel has enough."""
        for position, node in self._tree.children(fh, start_id):
            if not pyfuse3.readdir_reply(token, node.name, self._attributes(node), position):
                return

    async def releasedir(self, fh: int) -> None:
        """Nothing was allocated."""

    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        """Generated content is made here and kept until the handle is released."""
        node = self._node(inode)
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC):
            raise pyfuse3.FUSEError(errno.EROFS)
        if node.is_dir:
            raise pyfuse3.FUSEError(errno.EISDIR)
        if node.generate is None:
            return pyfuse3.FileInfo(fh=inode, keep_cache=True)
        try:
            content = node.generate()
        except Exception as error:  # a fault of ours must not reach the kernel as a dead connection
            log.exception("content of %r failed", node.name)
            raise pyfuse3.FUSEError(to_errno(error)) from error
        handle = next(self._handles)
        self._snapshots[handle] = content
        # The size is not known before the open, so the page cache must not clip the reads to it.
        return pyfuse3.FileInfo(fh=handle, direct_io=True)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        """Generated content only. A handle from before a resume has no snapshot: its reader opens again."""
        content = self._snapshots.get(fh)
        if content is None:
            raise pyfuse3.FUSEError(errno.ESTALE)
        return content[off : off + size]

    async def release(self, fh: int) -> None:
        """Drop the snapshot."""
        self._snapshots.pop(fh, None)

    async def flush(self, fh: int) -> None:
        """Nothing to write."""

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """Inodes live as long as the tree."""

    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        """A full, read-only file system."""
        data = pyfuse3.StatvfsData()
        nodes = list(self._tree.nodes())
        data.f_bsize = data.f_frsize = _BLOCK_BYTES
        data.f_blocks = sum(-(-(node.size_bytes or 0) // _BLOCK_BYTES) for node in nodes)
        data.f_bfree = data.f_bavail = data.f_ffree = data.f_favail = 0
        data.f_files = len(nodes)
        data.f_namemax = MAX_NAME_BYTES
        return data

    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        """The tree has no symbolic links."""
        raise pyfuse3.FUSEError(errno.EINVAL)

    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        """No attributes."""
        raise pyfuse3.FUSEError(pyfuse3.ENOATTR)

    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        """No attributes."""
        return []
