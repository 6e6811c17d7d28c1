"""What holds for every test of images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests._node import detach, mounted


@pytest.fixture(autouse=True)
def nothing_stays_mounted(tmp_path: Path) -> Iterator[None]:
    """A mount that a test leaves behind fails it, and would keep pytest from removing its directory."""
    yield
    left = [mountpoint for mountpoint in mounted() if mountpoint.is_relative_to(tmp_path)]
    for mountpoint in reversed(left):
        detach(mountpoint)
    assert left == []
