"""Mounting an image, overlays and binds."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from tests.image._trees import write

from bootseer import native
from bootseer.core.errors import IntegrityError, UsageError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    write(tmp_path / "tree/directory/file", b"content")
    native.build_image(
        directory=str(tmp_path / "tree"), output_path=str(tmp_path / "image"), spool_dir=str(tmp_path)
    )
    return tmp_path / "image"


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "mnt"
    path.mkdir()
    yield path
    while path.is_mount():
        native.umount(str(path), lazy=True)


def mount_lines(path: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if Path(line.split()[4]).is_relative_to(path)]


def kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])


def loop_devices() -> int:
    return sum(Path(f"{device}/loop").exists() for device in Path("/sys/block").glob("loop*"))


@pytest.mark.parametrize("by", ["any", "file", "loop"])
def test_an_image_is_mounted_read_only(image: Path, target: Path, by: Literal["any", "file", "loop"]) -> None:
    if by == "file" and kernel() < (6, 12):
        pytest.skip("the kernel has no EROFS on files")
    if by == "loop" and not Path("/dev/loop-control").exists():
        pytest.skip("no loop devices")
    how = native.mount_erofs(str(image), str(target), by=by)
    assert how.startswith("loop:/dev/loop" if by == "loop" or kernel() < (6, 12) else "file")
    assert (target / "directory/file").read_bytes() == b"content"
    with pytest.raises(OSError, match="Read-only file system"):
        (target / "new").touch()
    options = mount_lines(target)[0].split()[5].split(",")
    assert {"ro", "nodev"} <= set(options)
    native.umount(str(target))
    assert not target.is_mount()


def test_a_loop_device_goes_with_its_mount(image: Path, target: Path) -> None:
    if not Path("/dev/loop-control").exists():
        pytest.skip("no loop devices")
    how = native.mount_erofs(str(image), str(target), by="loop")
    number = how.removeprefix("loop:/dev/loop")
    backing = Path(f"/sys/block/loop{number}/loop/backing_file")
    assert backing.read_text().strip() == str(image)
    assert Path(f"/sys/block/loop{number}/queue/read_ahead_kb").read_text().strip() == "128"
    native.umount(str(target))
    assert not backing.exists() or backing.read_text().strip() != str(image)


def test_what_cannot_be_mounted(image: Path, target: Path, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="is no EROFS image"):
        native.mount_erofs(str(write(tmp_path / "text", b"text")), str(target))
    with pytest.raises(IntegrityError, match="is no EROFS image"):
        native.mount_erofs(str(write(tmp_path / "zeros", bytes(8192))), str(target))
    with pytest.raises(FileNotFoundError):
        native.mount_erofs(str(tmp_path / "missing"), str(target))
    with pytest.raises(FileNotFoundError):
        native.mount_erofs(str(image), str(tmp_path / "missing"))
    with pytest.raises(NotADirectoryError):
        native.mount_erofs(str(image), str(tmp_path / "text"))
    with pytest.raises(UsageError, match="not by magic"):
        native.mount_erofs(str(image), str(target), by="magic")  # type: ignore[arg-type]
    assert mount_lines(tmp_path) == []


def test_a_damaged_superblock_is_refused(image: Path, target: Path) -> None:
    before = loop_devices()
    data = bytearray(image.read_bytes())
    data[1024 + 50] ^= 1  # in the UUID: only the checksum knows
    image.write_bytes(data)
    with pytest.raises(OSError, match="mount"):
        native.mount_erofs(str(image), str(target))
    assert not target.is_mount()
    assert loop_devices() == before


@pytest.mark.parametrize("name", ["plain", "with:colon", "with,comma", "with\\backslash", "a b\nc"])
def test_an_overlay_on_an_image(image: Path, tmp_path: Path, name: str) -> None:
    base = tmp_path / name
    lower, second, upper, work, merged = (
        base / part for part in ("lower", "second", "upper", "work", "merged")
    )
    for path in (lower, second, upper, work, merged):
        path.mkdir(parents=True)
    write(second / "below")
    native.mount_erofs(str(image), str(lower))
    try:
        native.mount_overlay([str(lower), str(second)], str(upper), str(work), str(merged))
        try:
            assert sorted(path.name for path in merged.iterdir()) == ["below", "directory"]
            (merged / "directory/file").write_bytes(b"changed")
            assert (upper / "directory/file").read_bytes() == b"changed"
            assert (lower / "directory/file").read_bytes() == b"content"
        finally:
            native.umount(str(merged))
    finally:
        native.umount(str(lower))


def test_overlays_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a lower directory"):
        native.mount_overlay([], "u", "w", str(tmp_path))
    with pytest.raises(UsageError, match="too long"):
        native.mount_overlay(["x" * 200] * 30, "u", "w", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        native.mount_overlay([str(tmp_path / "missing")], str(tmp_path), str(tmp_path), str(tmp_path))


@pytest.mark.parametrize("read_only", [False, True])
def test_a_bind_and_what_is_mounted_below(image: Path, target: Path, tmp_path: Path, read_only: bool) -> None:
    source, below = tmp_path / "source", tmp_path / "below"
    (source / "sub").mkdir(parents=True)
    below.mkdir()
    native.mount_bind(str(below), str(source / "sub"))
    try:
        native.mount_bind(str(source), str(target), read_only=read_only)
        for path in (target / "a", target / "sub/a"):
            if read_only:
                with pytest.raises(OSError, match="Read-only file system"):
                    path.touch()
            else:
                path.touch()
        native.umount(str(target / "sub"))
        native.umount(str(target))
    finally:
        native.umount(str(source / "sub"))
    assert (below / "a").exists() != read_only


def test_unmounting(image: Path, target: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="umount"):
        native.umount(str(target))
    native.mount_erofs(str(image), str(target))
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(OSError, match="umount"):
        native.umount(str(tmp_path / "link"))
    with (target / "directory/file").open("rb") as file:
        with pytest.raises(OSError, match="busy"):
            native.umount(str(target))
        native.umount(str(target), lazy=True)
        assert not target.is_mount()
        assert file.read() == b"content"
