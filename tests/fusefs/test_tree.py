"""The tree against a dict of paths."""

from __future__ import annotations

import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bootseer.fusefs.tree import ROOT_INODE, Tree

NAMES = st.binary(min_size=1, max_size=6).filter(
    lambda n: b"/" not in n and b"\0" not in n and n not in {b".", b".."}
)


def content() -> bytes:
    return b"made anew"


class TreeMachine(RuleBasedStateMachine):
    """The model: path → size of a file, ``None`` for generated content, ``-1`` for a directory."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree()
        self.model: dict[tuple[bytes, ...], int | None] = {(): -1}
        self.inodes: dict[tuple[bytes, ...], int] = {(): ROOT_INODE}

    @rule(
        data=st.data(),
        name=NAMES,
        what=st.sampled_from(["dir", "file", "generated"]),
        size=st.integers(0, 1 << 40),
    )
    def add(self, data: st.DataObject, name: bytes, what: str, size: int) -> None:
        parent = data.draw(st.sampled_from(sorted(self.model)))
        path = (*parent, name)

        def call() -> int:
            inode = self.inodes[parent]
            if what == "dir":
                return self.tree.add_dir(inode, name)
            if what == "file":
                return self.tree.add_file(inode, name, size)
            return self.tree.add_generated(inode, name, content)

        if self.model[parent] != -1 or path in self.model:
            with pytest.raises(ValueError, match=r"is not a directory|is there already"):
                call()
            return
        self.inodes[path] = call()
        self.model[path] = {"dir": -1, "file": size, "generated": None}[what]

    @rule(data=st.data(), name=NAMES)
    def lookup(self, data: st.DataObject, name: bytes) -> None:
        parent = data.draw(st.sampled_from(sorted(self.model)))
        node = self.tree.lookup(self.inodes[parent], name)
        expected = self.inodes.get((*parent, name))
        assert (None if node is None else node.inode) == expected
        dot, dotdot = (self.tree.lookup(self.inodes[parent], dots) for dots in (b".", b".."))
        if self.model[parent] == -1:
            assert dot is not None and dotdot is not None
            assert (dot.inode, dotdot.inode) == (self.inodes[parent], self.inodes[parent[:-1]])
        else:
            assert dot is None and dotdot is None

    @rule(data=st.data(), start=st.integers(0, 20), stop_after=st.integers(1, 5))
    def list_in_pieces(self, data: st.DataObject, start: int, stop_after: int) -> None:
        directories = sorted(path for path, size in self.model.items() if size == -1)
        path = data.draw(st.sampled_from(directories))
        expected = [known[-1] for known in self.model if known and known[:-1] == path]
        inode = self.inodes[path]
        assert [node.name for _, node in self.tree.children(inode, start)] == expected[start:]
        found, position = [], 0
        while True:
            piece = [
                entry
                for entry, _ in zip(self.tree.children(inode, position), range(stop_after), strict=False)
            ]
            if not piece:
                break
            found += [node.name for _, node in piece]
            position = piece[-1][0]
        assert found == expected

    @invariant()
    def nodes_are_those_of_the_model(self) -> None:
        assert {node.inode for node in self.tree.nodes()} == set(self.inodes.values())
        assert len(set(self.inodes.values())) == len(self.model)
        for path, size in self.model.items():
            node = self.tree.get(self.inodes[path])
            assert node is not None
            assert node.is_dir == (size == -1)
            assert not node.mode & 0o222
            assert (node.generate is not None) == (size is None)
            if size is not None and size >= 0:
                assert stat.S_ISREG(node.mode)
                assert node.size_bytes == size

    @invariant()
    def the_same_steps_give_the_same_numbers(self) -> None:
        again = Tree()
        inodes: dict[tuple[bytes, ...], int] = {(): ROOT_INODE}
        for path, size in self.model.items():
            if not path:
                continue
            parent = inodes[path[:-1]]
            if size == -1:
                inodes[path] = again.add_dir(parent, path[-1])
            elif size is None:
                inodes[path] = again.add_generated(parent, path[-1], content)
            else:
                inodes[path] = again.add_file(parent, path[-1], size)
        assert inodes == self.inodes


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"/", b"a\0b", b"x" * 256])
def test_a_name_that_cannot_be(name: bytes) -> None:
    tree = Tree()
    with pytest.raises(ValueError, match="cannot be a file name"):
        tree.add_file(ROOT_INODE, name, 1)
    assert len(list(tree.nodes())) == 1


@given(st.integers(-(2**40), 2**40).filter(lambda inode: inode != ROOT_INODE))
def test_an_inode_that_is_not_there(inode: int) -> None:
    tree = Tree()
    assert tree.get(inode) is None
    assert tree.lookup(inode, b"a") is None


def test_the_longest_name() -> None:
    tree = Tree()
    inode = tree.add_dir(ROOT_INODE, b"x" * 255)
    node = tree.lookup(ROOT_INODE, b"x" * 255)
    assert node is not None
    assert node.inode == inode
