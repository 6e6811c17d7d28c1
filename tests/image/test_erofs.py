"""The EROFS image of a tree, as the kernel and fsck.erofs see it."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.image._trees import differences, fsck, look, make_tree, mounted

from bootseer import native
from bootseer.core.errors import UsageError


def build(directory: Path, image: Path) -> dict[str, Any]:
    return native.build_image(directory=str(directory), output_path=str(image), spool_dir=str(image.parent))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    root.mkdir()
    make_tree(root)
    return root


def test_the_kernel_sees_what_was_there(tree: Path, tmp_path: Path) -> None:
    image = tmp_path / "image"
    build(tree, image)
    fsck(image)
    with mounted(image, tmp_path / "mnt") as seen:
        assert differences(look(seen), look(tree)) == []


def test_an_empty_directory_is_an_image(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir(mode=0o750)
    built = build(tmp_path / "tree", tmp_path / "image")
    assert built["image_bytes"] == built["meta_bytes"] == 4096
    assert (built["files"], built["extents"]) == (1, [])
    fsck(tmp_path / "image")
    with mounted(tmp_path / "image", tmp_path / "mnt") as seen:
        assert differences(look(seen), look(tmp_path / "tree")) == []


def test_the_same_tree_gives_the_same_bytes(tree: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    build(tree, first)
    # A copy differs in inode numbers, in the order of its directories and in the path it lies at.
    subprocess.run(["cp", "-a", str(tree), str(tmp_path / "copy")], check=True)
    build(tmp_path / "copy", second)
    assert first.read_bytes() == second.read_bytes()


def test_metadata_comes_first_and_files_start_at_blocks(tree: Path, tmp_path: Path) -> None:
    built = build(tree, tmp_path / "image")
    extents = built["extents"]
    assert built["meta_bytes"] % 4096 == 0
    assert extents == sorted(extents) and all(extent % 4096 == 0 for extent in extents)
    assert extents[0] == built["meta_bytes"]
    assert built["image_bytes"] == (tmp_path / "image").stat().st_size
    content = (tmp_path / "image").read_bytes()
    for path in (tree / "links/one", tree / "sizes/4097"):  # never inline, whatever their size
        assert any(content.startswith(path.read_bytes(), extent) for extent in extents)


def test_a_change_of_content_changes_no_metadata(tree: Path, tmp_path: Path) -> None:
    before = build(tree, tmp_path / "1")
    path = tree / "sizes/4096"
    status = path.stat()
    path.write_bytes(b"!" * 4096)
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
    build(tree, tmp_path / "2")
    first, second = (tmp_path / "1").read_bytes(), (tmp_path / "2").read_bytes()
    assert first[: before["meta_bytes"]] == second[: before["meta_bytes"]]
    assert first != second


def test_holes_cost_nothing(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    with (tmp_path / "tree/sparse").open("wb") as file:
        file.truncate(256 << 20)
    build(tmp_path / "tree", tmp_path / "image")
    status = (tmp_path / "image").stat()
    assert status.st_size > 256 << 20
    assert status.st_blocks * 512 < 1 << 20


def test_a_link_to_a_root_is_followed(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tree)
    build(tmp_path / "link", tmp_path / "1")
    build(tree, tmp_path / "2")
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


@pytest.mark.parametrize("replacement", ["grown", "shorter", "fifo", "rewritten"])
def test_a_file_that_changes_meanwhile_is_an_error(tmp_path: Path, replacement: str) -> None:
    """The first file is changed while progress is reported of a file that is read before it."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a").write_bytes(os.urandom(33 << 20))
    victim = tree / "b"
    victim.write_bytes(b"before")

    def change(_stage: str, _done: int, _total: int) -> None:
        if replacement == "fifo":
            victim.unlink()
            os.mkfifo(victim)
        else:
            victim.write_bytes(
                {"grown": b"before and after", "shorter": b"b", "rewritten": b"behind"}[replacement]
            )

    with pytest.raises(UsageError, match="b changed while it was read"):
        native.build_image(
            directory=str(tree), output_path=str(tmp_path / "i"), spool_dir=str(tmp_path), progress=change
        )


def test_progress_ends_at_the_end_and_its_exception_passes(tree: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    built = native.build_image(
        directory=str(tree),
        output_path=str(tmp_path / "1"),
        spool_dir=str(tmp_path),
        progress=lambda *call: calls.append(call),
    )
    assert calls[-1] == ("building", built["image_bytes"], built["image_bytes"])

    def stop(*_: object) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        native.build_image(
            directory=str(tree), output_path=str(tmp_path / "2"), spool_dir=str(tmp_path), progress=stop
        )


def test_other_threads_run_meanwhile(tree: Path, tmp_path: Path) -> None:
    """The GIL is free: a thread that the build's progress waits for gets to run."""
    ran = threading.Event()
    thread = threading.Thread(target=ran.set)

    def wait(*_: object) -> None:
        thread.start()
        assert ran.wait(10)

    build_options: dict[str, Any] = {"output_path": str(tmp_path / "i"), "spool_dir": str(tmp_path)}
    native.build_image(directory=str(tree), progress=wait, **build_options)
    thread.join()


def test_what_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is not a directory"):
        build(tmp_path / "file", tmp_path / "image")
    with pytest.raises(FileNotFoundError):
        build(tmp_path / "missing", tmp_path / "image")
