"""Fixtures that more than one folder needs, and what the machine must be able to do for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests._node import Node, write_layout
from tests.native.origin import Image, make_image


@dataclass(frozen=True)
class StoredImage:
    """An image and the OCI layout that holds it."""

    content: Image
    layout: Path

    @property
    def raw(self) -> bytes:
        """The bytes of ``image.erofs``."""
        return self.content.raw


def missing_for_mounts() -> str:
    """Why this machine cannot mount FUSE; empty when it can."""
    if os.geteuid() != 0:
        return "needs root"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse: {error.strerror}"
    return ""


@pytest.fixture
def can_mount() -> None:
    """Skip, with the reason, where FUSE cannot be mounted."""
    if reason := missing_for_mounts():
        pytest.skip(reason)


@contextmanager
def shared_daemon() -> Iterator[Node]:
    """A node with a running daemon, for fixtures that many tests share."""
    if reason := missing_for_mounts():
        pytest.skip(reason)
    node = Node()
    try:
        node.start()
        yield node
        assert "Traceback" not in node.log(), node.log()
    finally:
        node.cleanup()


@pytest.fixture
def stopped_node(can_mount: None) -> Iterator[Node]:
    """The directories of a node, without a daemon."""
    node = Node()
    try:
        yield node
    finally:
        log = node.log()
        node.cleanup()
    assert "Traceback" not in log, log


@pytest.fixture
def node(stopped_node: Node) -> Node:
    """A node with a running daemon."""
    stopped_node.start()
    return stopped_node


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> StoredImage:
    """About 6 MiB of random bytes, zeros and compressed chunks as an image in a layout."""
    content = make_image(200, seed=7)
    return StoredImage(content, write_layout(tmp_path_factory.mktemp("image") / "layout", content))
