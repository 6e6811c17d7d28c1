"""Mounts, workers that die, daemons that die, and what is left behind."""

from __future__ import annotations

from tests._node import Node
from tests.conftest import StoredImage


def test_every_byte_is_right(node: Node, image: StoredImage) -> None:
    from pathlib import Path

    mount = node.mount(image.layout)
    assert mount.state == "ready"
    assert Path(mount.image_path).read_bytes() == image.raw
    assert node.client.unmount(mount.id).state == "unmounted"
    assert node.mounts() == []
    assert node.client.mounts() == []
