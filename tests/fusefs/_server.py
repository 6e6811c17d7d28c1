"""A process that serves a tree made here through pyfuse3 and a Session until it is unmounted.

Arguments: MOUNTPOINT and the FILE that the session serves.
"""

from __future__ import annotations

import itertools
import sys

import pyfuse3
import trio

from bootseer import native
from bootseer.fusefs.operations import Operations
from bootseer.fusefs.tree import ROOT_INODE, Tree

MANY = 5000
DEEP = 40
BIG_BYTES = 3 << 20


def big_content() -> bytes:
    """Larger than one read, and not the same anywhere."""
    return b"".join(number.to_bytes(4, "little") for number in range(BIG_BYTES // 4))


def make_tree(local: native.LocalFile) -> tuple[Tree, int]:
    """The tree and the inode of the file that the session serves."""
    tree = Tree()
    file = tree.add_file(ROOT_INODE, b"file", local.size_bytes)
    many = tree.add_dir(ROOT_INODE, b"many")
    for number in range(MANY):
        tree.add_file(many, f"entry-{number:05d}-{'x' * (number % 200)}".encode(), number)
    directory = ROOT_INODE
    for number in range(DEEP):
        directory = tree.add_dir(directory, f"deep{number}".encode())
    opens = itertools.count(1)

    def count() -> bytes:
        return b"%d\n" % next(opens)

    generated = tree.add_dir(ROOT_INODE, b"generated")
    tree.add_generated(generated, b"counter", count)
    tree.add_generated(generated, b"empty", lambda: b"")
    tree.add_generated(generated, b"big", big_content)
    tree.add_generated(generated, b"broken", lambda: str(1 // 0).encode())
    tree.add_file(ROOT_INODE, "\udcff\udcfe\n name".encode("utf-8", "surrogateescape"), 0)
    tree.add_dir(ROOT_INODE, b"nothing")
    return tree, file


def main() -> None:
    """Serve."""
    mountpoint, path = sys.argv[1:]
    local = native.LocalFile(path)
    tree, inode = make_tree(local)
    session = native.Session.mount(mountpoint)
    session.add_file(inode, local)
    options = set(pyfuse3.default_options) - {"default_permissions"}
    pyfuse3.init(Operations(tree), f"/dev/fd/{session.control_fd}", options)
    session.start()

    async def serve() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pyfuse3.main)
            await trio.lowlevel.wait_readable(session.ended_fd)
            pyfuse3.terminate()

    try:
        print("ready", flush=True)
        trio.run(serve)
    finally:
        session.stop()
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main()
