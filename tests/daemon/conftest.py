"""A daemon that many tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests._node import Node
from tests.conftest import missing_for_mounts


@pytest.fixture(scope="module")
def shared_node() -> Iterator[Node]:
    """One daemon for all requests that it is to survive and to refuse."""
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
def api(shared_node: Node) -> Iterator[Node]:
    """The shared daemon; it must answer after the test and have no mounts."""
    yield shared_node
    assert shared_node.client.status().mounts == []
