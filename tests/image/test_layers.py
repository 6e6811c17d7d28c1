"""Layers of OCI images applied to one tree: what tar writes, and every rule of whiteouts."""

from __future__ import annotations

import dataclasses
import gzip
import io
import os
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.image._trees import Entry, differences, fsck, look, make_tree, mounted

from bootseer import native
from bootseer.core.errors import IntegrityError, UsageError

MTIME = 1_700_000_000.25  # exact in binary


def build(layers: list[Path], image: Path) -> dict[str, Any]:
    return native.build_image(
        layers=[str(layer) for layer in layers], output_path=str(image), spool_dir=str(image.parent)
    )


@contextmanager
def applied(tmp_path: Path, *layers: Path) -> Iterator[dict[str, Entry]]:
    """What a mount of all layers together shows."""
    build(list(layers), tmp_path / "image")
    fsck(tmp_path / "image")
    with mounted(tmp_path / "image", tmp_path / "mnt") as root:
        yield look(root)


class Layer:
    """A tar in the making; the empty name is the root."""

    def __init__(self) -> None:
        self._data = io.BytesIO()
        self._tar = tarfile.open(  # noqa: SIM115  (closed by save)
            fileobj=self._data, mode="w", format=tarfile.PAX_FORMAT
        )

    def add(self, name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, **fields: Any) -> Layer:
        info = tarfile.TarInfo(name)
        info.type, info.size, info.mtime = kind, len(data), MTIME
        info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
        for field, value in fields.items():
            setattr(info, field, value)
        self._tar.addfile(info, io.BytesIO(data))
        return self

    def directory(self, name: str, **fields: Any) -> Layer:
        return self.add(name, kind=tarfile.DIRTYPE, **fields)

    def symlink(self, name: str, target: str) -> Layer:
        return self.add(name, kind=tarfile.SYMTYPE, linkname=target)

    def link(self, name: str, target: str) -> Layer:
        return self.add(name, kind=tarfile.LNKTYPE, linkname=target)

    def save(self, path: Path, pack: Callable[[bytes], bytes] = bytes) -> Path:
        self._tar.close()
        path.write_bytes(pack(self._data.getvalue()))
        return path


def stack(tmp_path: Path, *layers: Layer) -> list[Path]:
    return [layer.save(tmp_path / f"layer-{index}") for index, layer in enumerate(layers)]


def tar(tree: Path, path: Path, *options: str) -> Path:
    command = ["tar", *options, "--numeric-owner", "-C", str(tree), "-cf", str(path), "."]
    subprocess.run(command, check=True)
    return path


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layers") / "tree"
    root.mkdir()
    make_tree(root)
    return root


@pytest.mark.parametrize("options", [("--sparse",), ()], ids=["sparse", "plain"])
def test_a_posix_tar_keeps_everything(tree: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    layer = tar(tree, tmp_path / "layer", "--format=posix", "--xattrs", "--xattrs-include=*", *options)
    with applied(tmp_path, layer) as seen:
        assert differences(seen, look(tree)) == []


@pytest.mark.parametrize("options", [("--sparse",), ()], ids=["sparse", "plain"])
def test_a_gnu_tar_keeps_all_that_it_holds(tree: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    layer = tar(tree, tmp_path / "layer", "--format=gnu", *options)
    whole_seconds = 10**9
    wanted = {
        name: dataclasses.replace(entry, xattrs=(), mtime_ns=entry.mtime_ns // whole_seconds * whole_seconds)
        for name, entry in look(tree).items()
    }
    with applied(tmp_path, layer) as seen:
        assert differences(seen, wanted) == []


def test_a_directory_and_its_tar_give_the_same_image(tree: Path, tmp_path: Path) -> None:
    layer = tar(tree, tmp_path / "layer", "--format=posix", "--xattrs", "--xattrs-include=*")
    build([layer], tmp_path / "1")
    native.build_image(directory=str(tree), output_path=str(tmp_path / "2"), spool_dir=str(tmp_path))
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_names_do_not_depend_on_the_locale(tree: Path, tmp_path: Path, locale: str) -> None:
    """libarchive converts the names of pax headers to the locale's character set where it can."""
    layer = Layer().add("ü", b"content").link("second", "ü").symlink("link", "ü").save(tmp_path / "layer")
    script = (
        "import sys; from bootseer import native;"
        "native.build_image(layers=[sys.argv[1]], output_path=sys.argv[2], spool_dir=sys.argv[3])"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(layer), str(tmp_path / "image"), str(tmp_path)],
        env={**os.environ, "LC_ALL": locale, "PYTHONCOERCECLOCALE": "0"},
        check=True,
    )
    with mounted(tmp_path / "image", tmp_path / "mnt") as root:
        seen = look(root)
    assert seen["second"].names == ("second", "ü")
    assert seen["link"].content == "ü"


@pytest.mark.parametrize("name", [b"\xff\xfe", b"caf\xe9/\xe9", b"\xc3"])
def test_names_that_are_not_utf8(tmp_path: Path, name: bytes) -> None:
    """Also in the pax headers that Go writes for them, raw."""
    text = os.fsdecode(name)
    layer = (
        Layer().add(text, b"content", pax_headers={"path": text}).symlink("link", text).link("second", text)
    )
    with applied(tmp_path, layer.save(tmp_path / "layer")) as seen:
        assert seen[text].names == tuple(sorted((text, "second")))
        assert seen["link"].content == text


@pytest.mark.parametrize("program", ["gzip", "zstd"])
def test_compressed_layers(tree: Path, tmp_path: Path, program: str) -> None:
    """One frame, and several, as pigz, estargz and zstd:chunked write them."""
    plain = tar(tree, tmp_path / "layer", "--format=posix")
    data = plain.read_bytes()

    def pack(part: bytes) -> bytes:
        return subprocess.run([program, "-c", "-3"], input=part, stdout=subprocess.PIPE, check=True).stdout

    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00note" if program == "zstd" else b""
    (tmp_path / "one").write_bytes(pack(data))
    third = len(data) // 3
    parts = [data[:third], data[third : 2 * third], data[2 * third :]]
    (tmp_path / "several").write_bytes(skippable + b"".join(pack(part) + skippable for part in parts))
    build([plain], tmp_path / "0")
    for name in ("one", "several"):
        build([tmp_path / name], tmp_path / "image")
        assert (tmp_path / "image").read_bytes() == (tmp_path / "0").read_bytes(), name


def test_upper_layers_replace_and_extend(tmp_path: Path) -> None:
    lower = Layer().directory("d", mode=0o700).add("d/old", b"old").add("f", b"1").add("was-file", b"")
    lower.directory("was-directory").add("was-directory/child", b"")
    upper = Layer().directory("d", mode=0o711, uid=7).add("d/new", b"new").add("f", b"22")
    upper.add("was-file/child", b"").add("was-directory", b"file now")
    with applied(tmp_path, *stack(tmp_path, lower, upper)) as seen:
        assert seen.keys() == {
            *(".", "d", "d/old", "d/new", "f"),
            *("was-file", "was-file/child", "was-directory"),
        }
        assert (stat.S_IMODE(seen["d"].mode), seen["d"].uid, seen["d"].mtime_ns) == (
            0o711,
            7,
            1_700_000_000_250_000_000,
        )
        assert seen["f"].size == 2
        assert stat.S_ISDIR(seen["was-file"].mode)
        assert stat.S_ISREG(seen["was-directory"].mode)


@pytest.mark.parametrize("last", [False, True], ids=["whiteout first", "whiteout last"])
def test_whiteouts_hide_lower_layers_only(tmp_path: Path, last: bool) -> None:
    lower = Layer().add("file").add("d/a").add("d/b").add("other/x").add("same", b"old").add("kept", b"data")
    lower.add("opaque/a").add("opaque/sub/b").add("linked", b"old")
    brought = [("same", b"new"), ("opaque/c", b""), ("opaque/sub/d", b"")]
    whiteouts = [
        ".wh.file",
        "d/.wh.a",
        ".wh.other",
        ".wh.same",
        "opaque/.wh..wh..opq",
        ".wh.linked",
        ".wh.none",
    ]
    upper = Layer()
    for name in () if last else whiteouts:
        upper.add(name)
    for name, data in brought:
        upper.add(name, data)
    # Names that this layer brings, of inodes that it does not.
    upper.link("linked", "kept").link("opaque/e", "kept")
    for name in whiteouts if last else ():
        upper.add(name)
    with applied(tmp_path, *stack(tmp_path, lower, upper)) as seen:
        assert seen.keys() == {
            *(".", "d", "d/b", "same", "kept", "linked"),
            *("opaque", "opaque/c", "opaque/e", "opaque/sub", "opaque/sub/d"),
        }
        assert seen["same"].size == 3
        assert seen["linked"].names == ("kept", "linked", "opaque/e")


def test_a_whiteout_ends_with_its_layer(tmp_path: Path) -> None:
    layers = stack(
        tmp_path, Layer().add("a", b"1"), Layer().add(".wh.a"), Layer().add("b"), Layer().add("a", b"22")
    )
    with applied(tmp_path, *layers[:3]) as seen:
        assert seen.keys() == {".", "b"}
    with applied(tmp_path, *layers) as seen:
        assert seen["a"].size == 2


def test_hard_links_across_layers(tmp_path: Path) -> None:
    """A name of a lower layer's file, and what becomes of the others when one name is replaced."""
    layers = stack(
        tmp_path,
        Layer().add("a", b"old").link("b", "a"),
        Layer().link("c", "a"),
        Layer().add("a", b"new!"),
    )
    with applied(tmp_path, *layers) as seen:
        assert seen["b"].names == ("b", "c")
        assert (seen["a"].size, seen["a"].names) == (4, ("a",))


def test_parents_that_are_symbolic_links_stay_inside(tmp_path: Path) -> None:
    """/lib -> usr/lib of a merged Debian; absolute and upward targets end at the root."""
    lower = Layer().directory("usr/lib").symlink("lib", "usr/lib").symlink("absolute", "/usr/lib")
    lower.symlink("up", "../../../usr").add("usr/lib/old")
    upper = Layer().add("lib/a").add("absolute/b").add("up/lib/c").add("lib/.wh.old").link("hard", "up/lib/a")
    with applied(tmp_path, *stack(tmp_path, lower, upper)) as seen:
        names = {"usr", "usr/lib", "usr/lib/a", "usr/lib/b", "usr/lib/c"}
        assert seen.keys() == {".", "lib", "absolute", "up", "hard"} | names
        assert stat.S_ISLNK(seen["lib"].mode)
        assert seen["hard"].names == ("hard", "usr/lib/a")


def test_the_root_and_missing_parents(tmp_path: Path) -> None:
    layer = (
        Layer()
        .directory("./", mode=0o711, uid=5)
        .add("a/b/c")
        .directory("later/deep")
        .directory("later", mode=0o700)
    )
    with applied(tmp_path, *stack(tmp_path, layer)) as seen:
        assert (stat.S_IMODE(seen["."].mode), seen["."].uid) == (0o711, 5)
        assert stat.S_IMODE(seen["a/b"].mode) == 0o755
        assert stat.S_IMODE(seen["later"].mode) == 0o700


def test_attributes_that_an_image_must_not_bring(tmp_path: Path) -> None:
    headers = {
        "SCHILY.xattr.user.kept": "yes",
        "SCHILY.xattr.trusted.overlay.redirect": "/etc",
        "SCHILY.xattr.security.selinux": "label",
    }
    with applied(tmp_path, *stack(tmp_path, Layer().add("f", pax_headers=headers))) as seen:
        assert seen["f"].xattrs == (("user.kept", b"yes"),)


def test_no_layers_and_empty_layers(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with applied(tmp_path) as seen:
        assert seen.keys() == {"."}
    with applied(tmp_path, tmp_path / "empty", *stack(tmp_path, Layer())) as seen:
        assert seen.keys() == {"."}


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Layer().add("../escape"), "leads out of the image"),
        (Layer().add("a/../../escape"), "leads out of the image"),
        (Layer().link("a", "missing"), "refers to missing"),
        (Layer().directory("d").link("a", "d"), "refers to d"),
        (Layer().link("a", "../../etc/passwd"), "leads out of the image"),
        (Layer().symlink("a", "b").symlink("b", "a").add("a/c"), "too many symbolic links"),
        (Layer().add("d/" * 2000), "nested too deeply"),
        (Layer().add("./."), "the root is no directory"),
    ],
    ids=str,
)
def test_hostile_layers(tmp_path: Path, layer: Layer, message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        build(stack(tmp_path, layer), tmp_path / "image")


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Layer().add("n" * 256), "longer than 255 bytes"),
        (Layer().symlink("a", "t" * 5000), "5000 bytes"),
    ],
    ids=str,
)
def test_what_no_file_system_holds(tmp_path: Path, layer: Layer, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(stack(tmp_path, layer), tmp_path / "image")


def test_broken_archives(tree: Path, tmp_path: Path) -> None:
    whole = tar(tree, tmp_path / "whole", "--format=posix").read_bytes()
    packed = gzip.compress(whole, 1)
    for name, data in {
        "text": b"not an archive" * 100,
        "cut": whole[: len(whole) // 2 + 100],
        "cut gzip": packed[: len(packed) // 2],
        "flipped": packed[:5000] + bytes([packed[5000] ^ 0xFF]) + packed[5001:],
        "bzip2": subprocess.run(["bzip2"], input=whole, stdout=subprocess.PIPE, check=True).stdout,
    }.items():
        (tmp_path / "layer").write_bytes(data)
        with pytest.raises(IntegrityError):
            build([tmp_path / "layer"], tmp_path / "image")
            pytest.fail(name)


def test_progress_counts_what_was_read_of_the_layers(tree: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    layers = [tar(tree, tmp_path / name, "--format=posix") for name in ("1", "2")]
    native.build_image(
        layers=[str(layer) for layer in layers],
        output_path=str(tmp_path / "image"),
        spool_dir=str(tmp_path),
        progress=lambda *call: calls.append(call),
    )
    reading = [(done, total) for stage, done, total in calls if stage == "reading layers"]
    total_bytes = sum(layer.stat().st_size for layer in layers)
    assert reading == sorted(reading) and len(reading) >= 2
    assert all(done <= total == total_bytes for done, total in reading)


def test_nothing_is_left_of_the_spool(tree: Path, tmp_path: Path) -> None:
    build([tar(tree, tmp_path / "layer", "--format=posix")], tmp_path / "image")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["image", "layer"]
