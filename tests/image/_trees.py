"""Trees of files with everything that a root file system can hold, and what a reader of one sees."""

from __future__ import annotations

import hashlib
import os
import random
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from bootseer import native

CAP_NET_RAW = bytes.fromhex(
    "0100000200200000000000000000000000000000"
)  # a v2 security.capability: cap_net_raw=ep


@contextmanager
def disk_of(size: str, place: Path) -> Iterator[Path]:
    """A file system of its own that can hold no more than ``size`` (as tmpfs writes it); root only."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        native.umount(str(place))


@dataclass(frozen=True)
class Entry:
    """All that stat, the content and the extended attributes say of one name; ``names`` are those of its inode."""

    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    device: int
    content: str
    xattrs: tuple[tuple[str, bytes], ...]
    names: tuple[str, ...]


def look(root: Path, *, with_mtimes: bool = True) -> dict[str, Entry]:
    """Everything below ``root`` by its relative name; ``.`` is the root itself."""
    paths = [root, *_below(root)]
    stats = {path: path.lstat() for path in paths}
    inodes: dict[int, list[str]] = {}
    for path, status in stats.items():
        inodes.setdefault(status.st_ino, []).append(str(path.relative_to(root)))
    seen = {}
    for path, status in stats.items():
        names = tuple(sorted(inodes[status.st_ino]))
        if not stat.S_ISDIR(status.st_mode):
            assert status.st_nlink == len(names), path
        seen[str(path.relative_to(root))] = Entry(
            mode=status.st_mode,
            uid=status.st_uid,
            gid=status.st_gid,
            size=0 if stat.S_ISDIR(status.st_mode) else status.st_size,
            mtime_ns=status.st_mtime_ns if with_mtimes else 0,
            device=status.st_rdev,
            content=_content(path, status.st_mode),
            xattrs=_xattrs(path),
            names=names,
        )
    return seen


def _below(root: Path) -> list[Path]:
    # Not rglob(): it follows symbolic links to see whether they are directories, and some cannot be followed.
    return [Path(folder, name) for folder, fs, ds in os.walk(root) for name in (*fs, *ds)]


def _xattrs(path: Path) -> tuple[tuple[str, bytes], ...]:
    names = sorted(os.listxattr(path, follow_symlinks=False))
    kept = [name for name in names if name != "security.selinux"]
    return tuple((name, os.getxattr(path, name, follow_symlinks=False)) for name in kept)


def _content(path: Path, mode: int) -> str:
    if stat.S_ISLNK(mode):
        return str(path.readlink())
    if stat.S_ISREG(mode):
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return ""


def differences(got: dict[str, Entry], wanted: dict[str, Entry]) -> list[str]:
    """What differs, one line each: readable, where the dictionaries themselves would be pages."""
    lines = [f"missing: {path!r}" for path in wanted.keys() - got.keys()]
    lines += [f"too much: {path!r}" for path in got.keys() - wanted.keys()]
    lines += [f"{p!r}: {got[p]} != {wanted[p]}" for p in got.keys() & wanted.keys() if got[p] != wanted[p]]
    return lines


def write(path: Path, data: bytes = b"") -> Path:
    """A file, with the directories that lead to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def make_tree(root: Path, *, seed: int = 1) -> None:
    """Fill a directory. As root: also owners, devices, capabilities and trusted attributes."""
    rng = random.Random(seed)
    for size in (0, 1, 4095, 4096, 4097, 3 << 20):  # around the block, and more than one read
        write(root / f"sizes/{size}", rng.randbytes(size))
    write(root / "zeros", bytes(1 << 20))
    with write(root / "sparse", b"head").open("r+b") as file:  # holes in front of and behind data
        file.seek(5 << 20)
        file.write(b"tail")
        file.truncate(9 << 20)
    for raw in (
        b"\xff\xfe not utf-8",
        "ünï".encode(),
        b"new\nline",
        b"-dash",
        b"!before the dots",
        b"n" * 255,
    ):
        write(root / "names" / os.fsdecode(raw), raw)
    for index in range(700):  # directories of several blocks, with names of many lengths
        write(root / "many" / f"{index}-{'x' * (index % 150)}", b"%d" % index)
    (root / "empty directory").mkdir()
    (root / "deep" / Path(*["d"] * 60)).mkdir(parents=True)

    write(root / "links/one", b"linked")
    (root / "links/two").hardlink_to(root / "links/one")
    (root / "three").hardlink_to(root / "links/one")
    for name, target in {
        "relative": b"links/one",
        "dangling": b"/no/such/file",
        "long": b"t" * 4000,  # does not fit behind its inode
        "bytes": b"\xff\xfe",
    }.items():
        (root / name).symlink_to(os.fsdecode(target))
    os.link(root / "bytes", root / "links/to a symbolic link", follow_symlinks=False)
    os.mkfifo(root / "fifo", 0o640)

    several = write(root / "xattrs/several")
    os.setxattr(several, "user.one", b"1")
    os.setxattr(several, "user.empty", b"")
    os.setxattr(several, "user.binary", bytes(range(256)))
    os.setxattr(write(root / "xattrs/large", b"data"), "user.large", rng.randbytes(3500))
    os.setxattr(root / "xattrs", "user.of.a.directory", b"yes")

    write(root / "modes/set-user-id").chmod(0o4755)
    write(root / "modes/none").chmod(0)
    (root / "modes").chmod(0o1777)
    if os.geteuid() == 0:
        os.setxattr(write(root / "xattrs/capability", b"program"), "security.capability", CAP_NET_RAW)
        os.setxattr(root / "xattrs/large", "trusted.bootseer", b"only root sees it")
        os.mknod(root / "character", stat.S_IFCHR | 0o600, os.makedev(5, 1))
        os.mknod(root / "block", stat.S_IFBLK | 0o600, os.makedev(259, 300_000))
        os.chown(write(root / "owners/large"), 3_000_000_000, 70_000)
        os.chown(root / "relative", 1000, 1001, follow_symlinks=False)
    for path in [*sorted(_below(root), reverse=True), root]:
        mtime_ns = rng.randrange(1_000_000_000 * 10**9, 1_900_000_000 * 10**9)
        os.utime(path, ns=(mtime_ns, mtime_ns), follow_symlinks=False)
    for name, mtime_ns in {
        "sizes/0": 0,
        "sizes/1": -2_000_000_000,
        "zeros": 5_000_000_000_123_456_789,
    }.items():
        os.utime(root / name, ns=(mtime_ns, mtime_ns))


def fsck(image: Path) -> None:
    """Debian's own checker finds nothing wrong."""
    result = subprocess.run(["fsck.erofs", "-d3", str(image)], capture_output=True, text=True, check=False)
    said = result.stdout + result.stderr
    assert result.returncode == 0 and "No errors found" in said, said[-2000:]


@contextmanager
def mounted(image: Path, target: Path) -> Iterator[Path]:
    """The kernel's view of an image."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if "\terofs" not in Path("/proc/filesystems").read_text():
        pytest.skip("the kernel has no EROFS")
    target.mkdir(exist_ok=True)
    native.mount_erofs(str(image), str(target))
    try:
        yield target
    finally:
        native.umount(str(target))
