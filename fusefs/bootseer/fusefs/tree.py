"""The content model of a mount: a small read-only tree. Knows nothing of FUSE.

Inode numbers are given in the order in which the tree is built, so the same tree has the same numbers in every
process: a resumed worker needs no table of open inodes.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

ROOT_INODE = 1
MAX_NAME_BYTES = 255  # NAME_MAX of Linux


@dataclass(frozen=True)
class Node:
    """One entry. ``size_bytes`` is ``None`` for generated content, whose size is only known when it is opened."""

    inode: int
    name: bytes
    parent: int
    mode: int
    size_bytes: int | None = 0
    children: dict[bytes, int] = field(default_factory=dict)
    generate: Callable[[], bytes] | None = None

    @property
    def is_dir(self) -> bool:
        """Whether this is a directory."""
        return stat.S_ISDIR(self.mode)


class Tree:
    """Build with :meth:`add_dir`, :meth:`add_file`, :meth:`add_generated`; then only read."""

    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {ROOT_INODE: Node(ROOT_INODE, b"", ROOT_INODE, stat.S_IFDIR | 0o555)}

    def add_dir(self, parent: int, name: bytes) -> int:
        """Add an empty directory; returns its inode."""
        return self._add(parent, name, stat.S_IFDIR | 0o555, None, None)

    def add_file(self, parent: int, name: bytes, size_bytes: int) -> int:
        """Add a file whose bytes somebody else serves; returns its inode."""
        return self._add(parent, name, stat.S_IFREG | 0o444, size_bytes, None)

    def add_generated(self, parent: int, name: bytes, generate: Callable[[], bytes]) -> int:
        """Add a file whose content is made anew for each open; returns its inode."""
        return self._add(parent, name, stat.S_IFREG | 0o444, None, generate)

    def _add(
        self,
        parent: int,
        name: bytes,
        mode: int,
        size_bytes: int | None,
        generate: Callable[[], bytes] | None,
    ) -> int:
        directory = self._nodes[parent]
        if not directory.is_dir:
            raise ValueError(f"inode {parent} is not a directory")
        if not name or b"/" in name or b"\0" in name or name in {b".", b".."} or len(name) > MAX_NAME_BYTES:
            raise ValueError(f"{name!r} cannot be a file name")
        if name in directory.children:
            raise ValueError(f"{name!r} is there already")
        inode = len(self._nodes) + ROOT_INODE
        self._nodes[inode] = Node(inode, name, parent, mode, size_bytes, generate=generate)
        directory.children[name] = inode
        return inode

    def get(self, inode: int) -> Node | None:
        """The node with this number, if there is one."""
        return self._nodes.get(inode)

    def lookup(self, parent: int, name: bytes) -> Node | None:
        """The child of a directory; ``.`` and ``..`` work as in a real one."""
        directory = self._nodes.get(parent)
        if directory is None or not directory.is_dir:
            return None
        if name == b".":
            return directory
        if name == b"..":
            return self._nodes[directory.parent]
        inode = directory.children.get(name)
        return None if inode is None else self._nodes[inode]

    def children(self, inode: int, start: int = 0) -> Iterator[tuple[int, Node]]:
        """Entries of a directory from position ``start`` on, each with the position that follows it."""
        directory = self._nodes[inode]
        for position, child in enumerate(list(directory.children.values())[start:], start + 1):
            yield position, self._nodes[child]

    def nodes(self) -> Iterable[Node]:
        """All nodes."""
        return self._nodes.values()
