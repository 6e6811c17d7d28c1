"""The operations through the kernel, on a real mount."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests._node import Node, detach
from tests.conftest import StoredImage, missing_for_mounts
from tests.fusefs._server import BIG_BYTES, DEEP, MANY, big_content

CONTENT = os.urandom(100_000)
_SERVER = Path(__file__).with_name("_server.py")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A mount of the tree of ``_server.py``."""
    if reason := missing_for_mounts():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("operations")
    (directory / "file").write_bytes(CONTENT)
    mountpoint = directory / "mnt"
    mountpoint.mkdir()
    argv = [sys.executable, str(_SERVER), str(mountpoint), str(directory / "file")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == "ready\n", process.stderr.read()
            yield mountpoint
            subprocess.run(["umount", str(mountpoint)], check=True)
            assert process.wait(20) == 0  # an unmount ends the server
            log = process.stderr.read()
            assert log.count("Traceback") == log.count("ZeroDivisionError"), log
        finally:
            detach(mountpoint)
            process.kill()


def names_in(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


# ---- names and attributes ----


def test_names_of_the_root(root: Path) -> None:
    names = {os.fsencode(entry.name) for entry in root.iterdir()}
    assert names == {b"file", b"many", b"deep0", b"generated", b"nothing", b"\xff\xfe\n name"}
    assert (root / os.fsdecode(b"\xff\xfe\n name")).stat().st_size == 0


def test_attributes(root: Path) -> None:
    file, directory, top = (path.stat() for path in (root / "file", root / "many", root))
    assert stat.S_ISREG(file.st_mode) and stat.S_IMODE(file.st_mode) == 0o444
    assert (file.st_size, file.st_nlink, file.st_uid, file.st_gid) == (len(CONTENT), 1, 0, 0)
    assert file.st_blocks == -(-len(CONTENT) // 512)
    for each in (directory, top):
        assert stat.S_ISDIR(each.st_mode) and stat.S_IMODE(each.st_mode) == 0o555
    assert len({file.st_ino, directory.st_ino, top.st_ino}) == 3
    assert (root / "file").stat() == file


def test_what_is_not_there(root: Path) -> None:
    assert not (root / "absent").exists()
    assert not (root / "many" / "absent").exists()
    with pytest.raises(NotADirectoryError):
        (root / "file" / "x").stat()
    with pytest.raises(OSError, match="File name too long"):
        (root / ("x" * 256)).stat()
    with pytest.raises(NotADirectoryError):
        names_in(root / "file")
    with pytest.raises(IsADirectoryError):
        (root / "many").read_bytes()


def test_a_deep_path(root: Path) -> None:
    path = root
    for number in range(DEEP):
        path /= f"deep{number}"
    assert list(path.iterdir()) == []
    assert os.path.realpath(path / ".." / "..") == str(path.parent.parent)


def test_a_big_directory(root: Path) -> None:
    names = names_in(root / "many")
    assert len(names) == MANY
    assert names == [f"entry-{number:05d}-{'x' * (number % 200)}" for number in range(MANY)]
    assert names_in(root / "nothing") == []


class Dirent(ctypes.Structure):
    """struct dirent of glibc, 64 bits."""

    _fields_ = (
        ("ino", ctypes.c_uint64),
        ("off", ctypes.c_int64),
        ("reclen", ctypes.c_ushort),
        ("type", ctypes.c_ubyte),
        ("name", ctypes.c_char * 256),
    )


def test_reading_a_directory_from_any_offset(root: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.opendir.restype = libc.telldir.restype = ctypes.c_void_p
    libc.telldir.restype = ctypes.c_long
    libc.readdir.restype = ctypes.POINTER(Dirent)
    for function in (libc.readdir, libc.telldir, libc.closedir, libc.rewinddir):
        function.argtypes = [ctypes.c_void_p]
    libc.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]
    stream = libc.opendir(os.fsencode(root / "many"))
    assert stream

    def following() -> bytes | None:
        while entry := libc.readdir(stream):
            name: bytes = entry.contents.name
            if name not in {b".", b".."}:
                return name
        return None

    try:
        positions: list[tuple[int, bytes]] = []
        while True:
            position = libc.telldir(stream)
            name = following()
            if name is None:
                break
            positions.append((position, name))
        assert len(positions) == MANY
        for position, name in positions[1::371] + positions[-1:] + positions[1:2]:
            libc.seekdir(stream, position)
            assert following() == name
        libc.rewinddir(stream)
        assert following() == positions[0][1]
    finally:
        libc.closedir(stream)


# ---- nothing may be written ----


@pytest.mark.parametrize(
    "write",
    [
        lambda root: os.open(root / "file", os.O_WRONLY),
        lambda root: os.open(root / "file", os.O_RDWR),
        lambda root: os.open(root / "file", os.O_RDONLY | os.O_TRUNC),
        lambda root: os.open(root / "generated" / "counter", os.O_RDWR),
        lambda root: os.open(root / "new", os.O_WRONLY | os.O_CREAT),
        lambda root: os.open(root, os.O_RDWR | os.O_TMPFILE),
        lambda root: os.truncate(root / "file", 0),
        lambda root: (root / "new").mkdir(),
        lambda root: (root / "file").unlink(),
        lambda root: (root / "nothing").rmdir(),
        lambda root: (root / "file").rename(root / "other"),
        lambda root: (root / "new").symlink_to("file"),
        lambda root: os.link(root / "file", root / "new"),
        lambda root: (root / "file").chmod(0o777),
        lambda root: os.utime(root / "file"),
        lambda root: os.setxattr(root / "file", "user.a", b"b"),
        lambda root: os.mkfifo(root / "new"),
    ],
)
def test_writing_is_refused(root: Path, write: Callable[[Path], object]) -> None:
    with pytest.raises(OSError) as caught:
        write(root)
    assert caught.value.errno == errno.EROFS
    assert (root / "file").read_bytes() == CONTENT


def test_access(root: Path) -> None:
    assert os.access(root / "file", os.R_OK)
    assert not os.access(root / "file", os.W_OK)
    assert not os.access(root / "file", os.X_OK)
    assert os.access(root / "many", os.R_OK | os.X_OK)
    assert not os.access(root / "many", os.W_OK)


# ---- content ----


def test_content_of_the_session(root: Path) -> None:
    assert (root / "file").read_bytes() == CONTENT
    with (root / "file").open("rb") as file:
        file.seek(99_990)
        assert file.read() == CONTENT[99_990:]
        file.seek(200_000)
        assert file.read(1) == b""


def test_generated_content_is_made_for_each_open(root: Path) -> None:
    path = root / "generated" / "counter"
    first = int(path.read_text())
    with path.open() as one, path.open() as two:
        assert int(two.read()) == first + 2
        assert int(one.read()) == first + 1
        one.seek(0)
        assert int(one.read()) == first + 1
    assert int(path.read_text()) == first + 3
    assert path.stat().st_size == 0  # not known before it is made


def test_generated_content_longer_than_a_read(root: Path) -> None:
    path = root / "generated" / "big"
    expected = big_content()
    assert path.read_bytes() == expected
    fd = os.open(path, os.O_RDONLY)
    try:
        assert os.pread(fd, 100, BIG_BYTES - 10) == expected[-10:]
        assert os.pread(fd, 100, BIG_BYTES) == b""
        assert os.pread(fd, 5, 1_234_567) == expected[1_234_567:][:5]
    finally:
        os.close(fd)
    assert (root / "generated" / "empty").read_bytes() == b""


def test_content_that_cannot_be_made_is_an_error_and_no_more(root: Path) -> None:
    for _ in range(3):
        with pytest.raises(OSError) as caught:
            (root / "generated" / "broken").read_bytes()
        assert caught.value.errno == errno.EIO
    assert (root / "file").read_bytes() == CONTENT


def test_extended_attributes(root: Path) -> None:
    assert os.listxattr(root / "file") == []
    with pytest.raises(OSError) as caught:
        os.getxattr(root / "file", "user.absent")
    assert caught.value.errno == errno.ENODATA


def test_statfs(root: Path) -> None:
    values = os.statvfs(root)
    assert (values.f_bavail, values.f_bfree, values.f_ffree) == (0, 0, 0)
    assert values.f_files >= MANY
    assert values.f_namemax == 255
    assert values.f_blocks * values.f_frsize >= len(CONTENT)
    assert values.f_flag & os.ST_RDONLY


def test_many_threads(root: Path) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(30):
                assert (root / "file").read_bytes() == CONTENT
                assert len(names_in(root / "many")) == MANY
                assert (root / "generated" / "counter").read_text().endswith("\n")
                assert not (root / f"absent-{number}").exists()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_reader_that_is_killed_leaves_nothing(root: Path) -> None:
    for _ in range(5):
        argv = [sys.executable, "-c", f"while True: open({str(root / 'generated/big')!r}, 'rb').read()"]
        with subprocess.Popen(argv) as process:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.2)
            process.kill()
    assert (root / "generated" / "big").read_bytes() == big_content()


# ---- what the worker serves ----


def test_a_mount_shows_its_statistics(node: Node, image: StoredImage) -> None:
    mount = node.mount(image.layout)
    top = Path(mount.fuse_mountpoint)
    assert names_in(top) == [".bootseer", "image.erofs"]
    assert names_in(top / ".bootseer") == ["stats.json"]
    path = top / ".bootseer" / "stats.json"
    before = json.loads(path.read_bytes())
    assert before["file.reads"] == 0
    assert Path(mount.image_path).read_bytes() == image.raw
    after = json.loads(path.read_bytes())
    assert after["file.reads"] > 0
    assert after["file.ready_bytes"] == after["file.image_bytes"] == len(image.raw)
    # The same names and nothing else, wherever one asks.
    assert set(after) == set(node.client.statistics(mount.id))
