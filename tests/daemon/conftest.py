"""A daemon that many tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests._node import Node
from tests.conftest import shared_daemon


@pytest.fixture(scope="module")
def shared_node() -> Iterator[Node]:
    """One daemon for all requests that it is to survive and to refuse."""
    with shared_daemon() as node:
        yield node


@pytest.fixture
def api(shared_node: Node) -> Iterator[Node]:
    """The shared daemon; it must answer after the test and have no mounts."""
    yield shared_node
    assert shared_node.client.status().mounts == []
