"""OCI layouts: what a reference means, and that writing loses nothing."""

from __future__ import annotations

import fcntl
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.image._layouts import (
    DOCKER,
    OCI,
    Descriptor,
    contents,
    finish,
    for_platform,
    put,
    put_manifest,
    tagged,
)

from bootseer.core.errors import IntegrityError, NotFoundError, UsageError
from bootseer.image import layout


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "layout"
    path.mkdir()
    return path


def read(root: Path, tag: str | None = None, digest: str | None = None, architecture: str = "amd64") -> str:
    """The digest of the manifest that a reference means."""
    store = layout.DirectoryStore(root)
    descriptor = layout.manifest_descriptor(store, tag, digest)
    data, manifest = layout.read_manifest(store, descriptor, architecture)
    assert json.loads(data) == manifest
    return layout.digest_of(data)


def make(root: Path, name: str, types: dict[str, str] = OCI) -> Descriptor:
    return put_manifest(root, [name.encode()], types=types)


def test_tags_and_digests(root: Path) -> None:
    a, b = make(root, "a"), make(root, "b")
    finish(root, [tagged(a, "a")])
    assert read(root) == read(root, "a") == a["digest"]  # the only one needs no name
    assert read(root, digest=b["digest"]) == b["digest"]  # in no index
    finish(root, [tagged(a, "a"), tagged(b, "latest")])
    assert read(root) == b["digest"]
    finish(root, [tagged(a, "a"), tagged(b, "b")])
    with pytest.raises(NotFoundError, match="has no image latest") as caught:
        read(root)
    assert caught.value.hint == "tags: a, b"
    with pytest.raises(NotFoundError, match="has no image c"):
        read(root, "c")


@pytest.mark.parametrize("types", [OCI, DOCKER], ids=["oci", "docker"])
@pytest.mark.parametrize("with_type", [True, False])
def test_an_index_is_followed_by_platform(root: Path, types: dict[str, str], with_type: bool) -> None:
    images = {name: make(root, name, types) for name in ("linux/arm64", "windows/amd64", "linux/amd64")}
    attestation = for_platform(make(root, "attestation", types), "unknown/unknown")
    index: dict[str, Any] = {
        "manifests": [attestation, *(for_platform(d, name) for name, d in images.items())]
    }
    if with_type:
        index["mediaType"] = types["index"]
    outer = {
        "mediaType": types["index"],
        "manifests": [put(root, types["index"] if with_type else "", index)],
    }
    finish(root, [tagged(put(root, types["index"], outer), "latest")])
    assert read(root, architecture="amd64") == images["linux/amd64"]["digest"]
    assert read(root, architecture="arm64") == images["linux/arm64"]["digest"]
    with pytest.raises(NotFoundError, match="no image for linux/riscv64") as caught:
        read(root, architecture="riscv64")
    assert caught.value.hint == "platforms: linux/amd64, linux/arm64, windows/amd64"


def test_a_platform_that_is_not_named_is_any(root: Path) -> None:
    unnamed, other = make(root, "unnamed"), for_platform(make(root, "other"), "linux/arm64")
    finish(root, [put(root, OCI["index"], {"manifests": [other, unnamed]})])
    assert read(root, architecture="amd64") == unnamed["digest"]
    assert read(root, architecture="arm64") == other["digest"]


def test_a_manifest_with_other_bytes(root: Path) -> None:
    descriptor = make(root, "a")
    finish(root, [descriptor])
    (root / layout.blob_path(descriptor["digest"])).write_bytes(b"{}")
    with pytest.raises(IntegrityError, match="holds other bytes"):
        read(root)


def test_indexes_without_end(root: Path) -> None:
    descriptor = make(root, "a")
    for _ in range(6):
        descriptor = put(root, OCI["index"], {"manifests": [descriptor]})
    finish(root, [descriptor])
    with pytest.raises(IntegrityError, match="nested too deeply"):
        read(root)


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"[]",
        b"{}",
        b"{" * 100_000,
        b'{"manifests": {}}',
        b'{"manifests": [1]}',
        b'{"manifests": [{}]}',
        b'{"manifests": [{"digest": 7}]}',
        b'{"manifests": [{"digest": "sha512:00"}]}',
        b'{"manifests": [{"digest": "sha256:../../../etc/passwd"}]}',
        b'{"manifests": [{"digest": "sha256:%s"}]}' % (b"0" * 64),
        b'{"manifests": [{"annotations": []}, {"annotations": {"org.opencontainers.image.ref.name": []}}]}',
        b'{"manifests": [{"platform": [], "annotations": 7}, {}]}',
        b'{"a": "%s"}' % (b"x" * layout.MAX_JSON_BYTES),
    ],
    ids=range(14),
)
def test_hostile_indexes(root: Path, index: bytes) -> None:
    finish(root, [])
    (root / "index.json").write_bytes(index)
    with pytest.raises((IntegrityError, NotFoundError)):
        read(root)


def test_hostile_platforms(root: Path) -> None:
    finish(
        root, [put(root, OCI["index"], {"manifests": [{"platform": ["linux"]}, {"platform": {"os": {}}}]})]
    )
    with pytest.raises(IntegrityError, match="is not a sha256 digest"):
        read(root)


def test_what_is_missing(root: Path) -> None:
    with pytest.raises(NotFoundError, match=r"has no index\.json"):
        read(root)
    finish(root, [{"mediaType": OCI["manifest"], "digest": "sha256:" + "0" * 64}])
    with pytest.raises(NotFoundError, match="has no blobs"):
        read(root)


def test_writing_makes_a_layout_that_reads_back(tmp_path: Path) -> None:
    root = tmp_path / "new" / "layout"
    with layout.LayoutWriter(root) as writer:
        first = writer.add_bytes(layout.MANIFEST_TYPE, b'{"a": 1}')
        writer.tag(first, "a")
        second = writer.add_bytes(layout.MANIFEST_TYPE, b'{"b": 2}')
        writer.tag(second, "b")
        writer.tag(second, "c")
        writer.tag(first, "b")  # moves
    assert [read(root, tag) for tag in "abc"] == [first["digest"], first["digest"], second["digest"]]
    assert json.loads((root / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    assert not list(root.glob(".tmp-*"))
    modes = {path.stat().st_mode & 0o777 for path in root.rglob("*") if path.is_file()}
    assert modes == {0o644}  # a web server runs as somebody else


def test_a_foreign_layout_keeps_what_it_has(root: Path) -> None:
    theirs = {**tagged(make(root, "a"), "a"), "platform": {"os": "linux", "architecture": "arm64"}, "x": [1]}
    untagged = make(root, "b")
    finish(root, [theirs, untagged])
    before = contents(root)
    writer = layout.LayoutWriter(root)
    writer.tag(writer.add_bytes(layout.MANIFEST_TYPE, b"{}"), "ours")
    entries = json.loads((root / "index.json").read_text())["manifests"]
    assert entries[:2] == [theirs, untagged]
    assert all(contents(root)[name] == data for name, data in before.items() if name != "index.json")


def test_where_no_layout_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file is not a directory"):
        layout.LayoutWriter(tmp_path / "file")
    with pytest.raises(UsageError, match="is not a directory"):
        layout.LayoutWriter(tmp_path / "file" / "below")
    with pytest.raises(UsageError, match="not empty and no OCI layout"):
        layout.LayoutWriter(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_failure_takes_back_what_it_added(root: Path) -> None:
    finish(root, [tagged(make(root, "a"), "a")])
    shared = make(root, "shared")
    before = contents(root)
    with pytest.raises(RuntimeError), layout.LayoutWriter(root) as writer, writer.all_or_nothing():
        writer.add_bytes(layout.CONFIG_TYPE, b"new")
        writer.add_bytes(OCI["manifest"], (root / layout.blob_path(shared["digest"])).read_bytes())
        raise RuntimeError
    assert contents(root) == before


def test_a_failure_takes_back_the_directory_it_made(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), layout.LayoutWriter(tmp_path / "layout"):
        raise RuntimeError
    assert not (tmp_path / "layout").exists()


def test_a_failed_write_of_the_index_leaves_the_old_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(root, [tagged(make(root, "a"), "a")])
    before = contents(root)
    writer = layout.LayoutWriter(root)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="No space"):
        writer.tag({"digest": "sha256:" + "0" * 64}, "b")
    assert contents(root) == before


def test_an_index_that_is_damaged_is_not_overwritten(root: Path) -> None:
    finish(root, [])
    (root / "index.json").write_text("damaged")
    with pytest.raises(IntegrityError):
        layout.LayoutWriter(root).tag({}, "a")
    assert (root / "index.json").read_text() == "damaged"


def test_writers_at_the_same_time_lose_no_tag(root: Path) -> None:
    finish(root, [])

    def write(name: str) -> None:
        writer = layout.LayoutWriter(root)
        for index in range(3):
            with writer.all_or_nothing():
                writer.tag(
                    writer.add_bytes(layout.MANIFEST_TYPE, f"{name}{index}".encode()), f"{name}{index}"
                )

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(json.loads((root / "index.json").read_text())["manifests"]) == 12


def test_temporary_files_of_the_dead_go_and_those_of_the_living_stay(root: Path) -> None:
    finish(root, [])
    living, dead = root / ".tmp-living", root / ".tmp-dead"
    dead.touch()
    with living.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        writer = layout.LayoutWriter(root)
        assert living.exists() and not dead.exists()
    with writer.temporary() as ours:
        layout.LayoutWriter(root)
        assert ours.exists() and not living.exists()
    assert not ours.exists()
    assert not list(root.glob(".tmp-*"))
