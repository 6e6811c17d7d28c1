"""Conversions that are unusual, broken in every way, or run out of disk."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.image._oci import LAYER_TYPE, OciLayout, blob_file, snapshot, tagged, unpack
from tests.image._trees import disk_of, fsck, make_tree, mounted
from tests.image.test_layers import Layer
from tests.native.origin import zstd

from bootseer import native
from bootseer.core.errors import BootseerError, IntegrityError, NotFoundError, UsageError
from bootseer.image import layout
from bootseer.image.convert import convert
from bootseer.image.resolve import resolve


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("convert") / "tree"
    root.mkdir()
    make_tree(root)
    return root


def tar_of(layer: Layer, tmp_path: Path) -> bytes:
    return layer.save(tmp_path / "tar").read_bytes()


def small(tmp_path: Path, content: bytes = b"content") -> bytes:
    return tar_of(Layer().add("file", content), tmp_path)


@contextmanager
def shown(destination: Path, tmp_path: Path) -> Iterator[Path]:
    """The converted image, mounted."""
    image = unpack(str(destination), tmp_path)
    fsck(image)
    with mounted(image, tmp_path / "mnt") as root:
        yield root


def no_leftovers(destination: Path) -> bool:
    return not [path for path in destination.rglob("*") if "tmp" in path.name]


def test_the_numbers_are_those_of_the_files(tree: Path, tmp_path: Path) -> None:
    made = convert(tree, tmp_path / "out")
    image = resolve(str(tmp_path / "out"))
    chunk_map = native.ChunkMap.parse(image.chunk_map)
    assert image.manifest_digest == made.digest
    assert made.image_bytes == chunk_map.image_bytes == unpack(str(tmp_path / "out"), tmp_path).stat().st_size
    assert made.meta_bytes == chunk_map.meta_bytes
    assert made.chunks == chunk_map.chunk_count
    assert made.blob_bytes == image.blobs[0].bytes == blob_file(image).stat().st_size
    assert image.blobs[0].digest == "sha256:" + chunk_map.blob_sha256.hex()


def test_options_change_the_chunks_and_not_the_image(tree: Path, tmp_path: Path) -> None:
    usual = convert(tree, tmp_path / "out", tag="usual")
    fine = convert(tree, tmp_path / "out", tag="fine", average_chunk_bytes=16 << 10, level=9)
    assert fine.chunks > usual.chunks
    images = [unpack(f"{tmp_path / 'out'}:{tag}", tmp_path).read_bytes() for tag in ("usual", "fine")]
    assert images[0] == images[1]


@pytest.mark.parametrize("tag", ["", "a b", "-x", "a/b", "é", "x" * 129, "a\nb"])
def test_a_tag_that_nobody_could_ask_for_is_refused(tmp_path: Path, tag: str) -> None:
    (tmp_path / "tree").mkdir()
    with pytest.raises(UsageError, match="tag"):
        convert(tmp_path / "tree", tmp_path / "out", tag=tag)
    assert not (tmp_path / "out").exists()


def test_an_empty_directory_is_an_image(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    assert convert(tmp_path / "tree", tmp_path / "out").files == 1
    with shown(tmp_path / "out", tmp_path) as root:
        assert list(root.iterdir()) == []


@pytest.mark.parametrize("after", [1, 2])
def test_an_interrupted_conversion_leaves_nothing(tree: Path, tmp_path: Path, after: int) -> None:
    calls = 0

    def interrupt(stage: str, done_bytes: int, total_bytes: int) -> None:
        nonlocal calls
        calls += 1
        if calls == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tree, tmp_path / "out", progress=interrupt)
    assert no_leftovers(tmp_path / "out")
    assert not (tmp_path / "out/index.json").exists()


def test_a_path_that_is_not_utf8(tmp_path: Path) -> None:
    root = tmp_path / os.fsdecode(b"caf\xe9")
    root.mkdir()
    (root / "file").write_bytes(b"content")
    convert(root, tmp_path / os.fsdecode(b"out\xff"))
    (tmp_path / os.fsdecode(b"out\xff")).rename(tmp_path / "out")
    with shown(tmp_path / "out", tmp_path) as seen:
        assert (seen / "file").read_bytes() == b"content"


# ---- where it goes ----


def test_tags_live_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    first = convert(tmp_path / "tree", tmp_path / "out", tag="one")
    (tmp_path / "tree/file").write_bytes(b"x")
    second = convert(tmp_path / "tree", tmp_path / "out", tag="two")
    assert resolve(f"{tmp_path}/out:one").manifest_digest == first.digest != second.digest
    assert resolve(f"{tmp_path}/out:two").manifest_digest == second.digest
    third = convert(tmp_path / "tree", tmp_path / "out", tag="one")  # moves on
    assert resolve(f"{tmp_path}/out:one").manifest_digest == third.digest == second.digest
    index = json.loads((tmp_path / "out/index.json").read_text())
    assert len(index["manifests"]) == 2


def test_other_entries_of_the_layout_stay(tmp_path: Path) -> None:
    oci = OciLayout(tmp_path / "out")
    foreign = tagged(oci.image(small(tmp_path)), "foreign")
    oci.write_index(foreign, {**foreign, "annotations": None}, annotations={"kept": "yes"})
    convert(Path(f"{tmp_path}/out:foreign"), tmp_path / "out", tag="lazy")
    index = json.loads((tmp_path / "out/index.json").read_text())
    assert index["annotations"] == {"kept": "yes"}
    assert index["manifests"][0] == foreign
    assert len(index["manifests"]) == 3
    with shown(Path(f"{tmp_path}/out:lazy"), tmp_path) as root:
        assert (root / "file").read_bytes() == b"content"


@pytest.mark.parametrize("inside", [".", "out", "a/b/out"])
def test_a_destination_inside_of_the_source_is_refused(tmp_path: Path, inside: str) -> None:
    (tmp_path / "tree").mkdir()
    before = list((tmp_path / "tree").iterdir())
    with pytest.raises(UsageError, match="lies in"):
        convert(tmp_path / "tree", tmp_path / "tree" / inside)
    assert list((tmp_path / "tree").iterdir()) == before


def test_a_destination_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "file").write_text("kept")
    for destination in ("file", "file/below"):
        with pytest.raises(UsageError, match="not a directory"):
            convert(tmp_path / "tree", tmp_path / destination)
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("index", ["{", "[]", '{"manifests": 5}', '{"manifests": [1]}', "null"])
def test_a_broken_index_of_the_destination_is_kept(tmp_path: Path, index: str) -> None:
    (tmp_path / "tree").mkdir()
    OciLayout(tmp_path / "out")
    (tmp_path / "out/index.json").write_text(index)
    before = snapshot(tmp_path / "out")
    with pytest.raises(IntegrityError, match=r"index\.json"):
        convert(tmp_path / "tree", tmp_path / "out")
    assert snapshot(tmp_path / "out") == before


def test_blobs_are_readable_by_others(tmp_path: Path) -> None:
    """A web server serves the layout, and it is not root."""
    (tmp_path / "tree").mkdir()
    before = os.umask(0o077)
    try:
        convert(tmp_path / "tree", tmp_path / "out")
    finally:
        os.umask(before)
    for path in (tmp_path / "out/blobs/sha256").iterdir():
        assert path.stat().st_mode & 0o777 == 0o644, path


@pytest.fixture
def little_disk(tmp_path: Path) -> Iterator[Path]:
    with disk_of("4m", tmp_path / "disk") as place:
        yield place


@pytest.mark.parametrize("file_bytes", [3 << 20, 8 << 20])  # the blob, the image
def test_a_full_disk_leaves_what_was_there(little_disk: Path, tmp_path: Path, file_bytes: int) -> None:
    (tmp_path / "tree").mkdir()
    convert(tmp_path / "tree", little_disk / "out")
    before = snapshot(little_disk)
    (tmp_path / "tree/file").write_bytes(os.urandom(file_bytes))
    with pytest.raises(BootseerError, match="no space left"):
        convert(tmp_path / "tree", little_disk / "out")
    assert snapshot(little_disk) == before


def test_a_disk_that_is_full_at_the_very_end(little_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    convert(tmp_path / "tree", little_disk / "out")
    before = (little_disk / "out/index.json").read_bytes()
    # An index that no longer fits: many entries of other tools.
    index = json.loads(before)
    index["manifests"] += [{**index["manifests"][0], "annotations": {"x": "y" * 100_000}}] * 11
    (little_disk / "out/index.json").write_text(json.dumps(index))
    before = (little_disk / "out/index.json").read_bytes()
    (little_disk / "filler").write_bytes(bytes((2 << 20) + (1 << 19)))
    with pytest.raises(BootseerError, match="no space left"):
        convert(tmp_path / "tree", little_disk / "out", tag="other")
    assert (little_disk / "out/index.json").read_bytes() == before
    assert no_leftovers(little_disk / "out")


# ---- an OCI image ----


def layers_of_an_image(tmp_path: Path) -> list[bytes]:
    return [
        tar_of(
            Layer()
            .directory("etc")
            .add("etc/old", b"old")
            .add("etc/changed", b"1")
            .add("data/hidden", b"x")
            .add("program", b"#!", mode=0o4755, uid=7, gid=8),
            tmp_path,
        ),
        tar_of(Layer().add("etc/.wh.old").add("etc/changed", b"2").add("data/.wh..wh..opq"), tmp_path),
        tar_of(Layer().add("data/new", b"new").link("data/linked", "etc/changed"), tmp_path),
    ]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd], ids=["plain", "gzip", "zstd"])
def test_the_layers_of_an_image_become_one_tree(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    oci = OciLayout(tmp_path / "oci")
    manifest = oci.image(
        *[pack(layer) for layer in layers_of_an_image(tmp_path)], config={"config": {"User": "7"}}
    )
    oci.write_index(manifest)
    convert(tmp_path / "oci", tmp_path / "out")
    with shown(tmp_path / "out", tmp_path) as root:
        seen = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        assert seen == {
            "etc/changed": b"2",
            "data/new": b"new",
            "data/linked": b"2",
            "program": b"#!",
        }
        assert (root / "data/linked").samefile(root / "etc/changed")
        status = (root / "program").stat()
        assert (status.st_mode & 0o7777, status.st_uid, status.st_gid) == (0o4755, 7, 8)
    image = resolve(str(tmp_path / "out"))
    assert image.config == {"config": {"User": "7"}}
    made = json.loads((tmp_path / "out" / layout.blob_path(image.manifest_digest)).read_bytes())
    assert made["subject"] == manifest


def test_more_than_a_hundred_layers(tmp_path: Path) -> None:
    oci = OciLayout(tmp_path / "oci")
    layers = [Layer().add(f"file{n}", b"%d" % n).add("last", b"%d" % n) for n in range(130)]
    oci.write_index(oci.image(*[tar_of(layer, tmp_path) for layer in layers]))
    convert(tmp_path / "oci", tmp_path / "out")
    with shown(tmp_path / "out", tmp_path) as root:
        assert len(list(root.iterdir())) == 131
        assert (root / "last").read_bytes() == b"129"


def test_an_image_without_layers(tmp_path: Path) -> None:
    oci = OciLayout(tmp_path / "oci")
    oci.write_index(oci.image())
    assert convert(tmp_path / "oci", tmp_path / "out").files == 1


def test_a_layer_that_occurs_twice(tmp_path: Path) -> None:
    oci = OciLayout(tmp_path / "oci")
    oci.write_index(oci.image(*[small(tmp_path)] * 2))
    convert(tmp_path / "oci", tmp_path / "out")


def test_docker_media_types(tmp_path: Path) -> None:
    oci = OciLayout(tmp_path / "oci")
    manifest = oci.image(
        gzip.compress(small(tmp_path)),
        manifest_type=layout.DOCKER_MANIFEST_TYPE,
        layer_type="application/vnd.docker.image.rootfs.diff.tar.gzip",
    )
    entry = {**manifest, "platform": {"architecture": "amd64", "os": "linux"}}
    oci.write_index(
        oci.json({"mediaType": layout.DOCKER_LIST_TYPE, "manifests": [entry]}, layout.DOCKER_LIST_TYPE)
    )
    convert(tmp_path / "oci", tmp_path / "out")
    with shown(tmp_path / "out", tmp_path) as root:
        assert (root / "file").read_bytes() == b"content"


def test_an_index_in_the_index_is_followed_by_platform(tmp_path: Path) -> None:
    oci = OciLayout(tmp_path / "oci")
    entries = [
        {**oci.image(small(tmp_path, name.encode())), "platform": {"architecture": name, "os": "linux"}}
        for name in ("arm64", "amd64", "riscv64")
    ]
    inner = oci.json({"mediaType": layout.INDEX_TYPE, "manifests": entries}, layout.INDEX_TYPE)
    oci.write_index(oci.json({"mediaType": layout.INDEX_TYPE, "manifests": [inner]}, layout.INDEX_TYPE))
    convert(tmp_path / "oci", tmp_path / "out")
    with shown(tmp_path / "out", tmp_path) as root:
        assert (root / "file").read_bytes() == b"amd64"


def test_the_attestations_of_a_build_are_no_images(tmp_path: Path) -> None:
    """BuildKit puts manifests of the platform unknown/unknown beside the image."""
    oci = OciLayout(tmp_path / "oci")
    extra = {**oci.image(b"{}"), "platform": {"architecture": "unknown", "os": "unknown"}}
    image = {**oci.image(small(tmp_path)), "platform": {"architecture": "amd64", "os": "linux"}}
    windows = {**oci.image(b"{}"), "platform": {"architecture": "amd64", "os": "windows"}}
    oci.write_index(
        oci.json({"mediaType": layout.INDEX_TYPE, "manifests": [extra, windows, image]}, layout.INDEX_TYPE)
    )
    convert(tmp_path / "oci", tmp_path / "out")


def test_images_by_tag_and_digest(tmp_path: Path) -> None:
    oci = OciLayout(tmp_path / "oci")
    images = {tag: oci.image(small(tmp_path, tag.encode())) for tag in ("one", "two", "latest")}
    oci.write_index(*[tagged(image, tag) for tag, image in images.items()])
    for reference, content in {
        "oci": b"latest",
        "oci:two": b"two",
        f"oci@{images['one']['digest']}": b"one",
    }.items():
        convert(tmp_path / reference, tmp_path / "out")
        with shown(tmp_path / "out", tmp_path) as root:
            assert (root / "file").read_bytes() == content


def test_a_converted_image_is_not_converted_again(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    convert(tmp_path / "tree", tmp_path / "out")
    with pytest.raises(UsageError, match="converted already"):
        convert(tmp_path / "out", tmp_path / "again")
    assert not (tmp_path / "again").exists()


# ---- sources that are broken ----


Breaker = Callable[[OciLayout, Path], object]


def without_a_layer(oci: OciLayout, tmp_path: Path) -> None:
    layer = oci.blob(small(tmp_path), LAYER_TYPE)
    oci.write_index(oci.image(layers=[layer]))
    (oci.root / layout.blob_path(layer["digest"])).unlink()


def with_another_layer(oci: OciLayout, tmp_path: Path) -> None:
    layer = oci.blob(small(tmp_path), LAYER_TYPE)
    oci.write_index(oci.image(layers=[layer]))
    (oci.root / layout.blob_path(layer["digest"])).write_bytes(small(tmp_path, b"other"))


def with_another_manifest(oci: OciLayout, tmp_path: Path) -> None:
    manifest = oci.image(small(tmp_path))
    oci.write_index(manifest)
    (oci.root / layout.blob_path(manifest["digest"])).write_bytes(b"{}")


def without_config(oci: OciLayout, tmp_path: Path) -> None:
    oci.write_index(oci.image(small(tmp_path), config={"gone": True}))
    config = json.dumps({"gone": True}).encode()
    (oci.root / layout.blob_path(layout.digest_of(config))).unlink()


def nested(oci: OciLayout, tmp_path: Path) -> None:
    descriptor = oci.image(small(tmp_path))
    for _ in range(10):
        descriptor = oci.json({"mediaType": layout.INDEX_TYPE, "manifests": [descriptor]}, layout.INDEX_TYPE)
    oci.write_index(descriptor)


def truncated(oci: OciLayout, tmp_path: Path) -> None:
    oci.write_index(oci.image(gzip.compress(small(tmp_path))[:-20]))


def index_text(text: str) -> Breaker:
    return lambda oci, _: (oci.root / "index.json").write_text(text)


def manifest_value(value: object) -> Breaker:
    return lambda oci, _: oci.write_index(oci.json(value, layout.MANIFEST_TYPE))


def entry_value(value: object) -> Breaker:
    return lambda oci, _: oci.write_index(value)


BROKEN: dict[str, tuple[Breaker, type[BootseerError], str]] = {
    "no index": (lambda oci, _: None, NotFoundError, r"index\.json"),
    "index is no JSON": (index_text("{"), IntegrityError, "not JSON"),
    "index is binary": (index_text("\x00\x01"), IntegrityError, "not JSON"),
    "index is deep": (index_text("[" * 100_000), IntegrityError, "not JSON"),
    "index is a list": (index_text("[]"), IntegrityError, "not a JSON object"),
    "index is empty": (index_text('{"manifests": []}'), NotFoundError, "no image"),
    "no manifests": (index_text("{}"), IntegrityError, "no list of manifests"),
    "manifests are numbers": (index_text('{"manifests": [1]}'), IntegrityError, "no list of manifests"),
    "no digest": (entry_value({}), IntegrityError, "not a sha256 digest"),
    "digest leads out": (entry_value({"digest": "sha256:../../x"}), IntegrityError, "not a sha256 digest"),
    "digest of another kind": (entry_value({"digest": "sha512:" + "0" * 128}), IntegrityError, "sha256"),
    "digest is a list": (entry_value({"digest": []}), IntegrityError, "not a sha256 digest"),
    "annotations are a list": (entry_value({"annotations": ["x"]}), IntegrityError, "."),
    "manifest is missing": (entry_value({"digest": "sha256:" + "0" * 64}), NotFoundError, "has no blobs"),
    "manifest is a string": (manifest_value("text"), IntegrityError, "not a JSON object"),
    "manifest is empty": (manifest_value({}), IntegrityError, "config"),
    "manifest has no layers": (manifest_value({"config": {}}), IntegrityError, "."),
    "media type is a list": (manifest_value({"mediaType": []}), IntegrityError, "."),
    "media type of something else": (manifest_value({"mediaType": "text/plain"}), IntegrityError, "config"),
    "manifest of the first schema": (
        manifest_value({"schemaVersion": 1, "fsLayers": []}),
        IntegrityError,
        "config",
    ),
    "other bytes in a manifest": (with_another_manifest, IntegrityError, "other bytes"),
    "other bytes in a layer": (with_another_layer, IntegrityError, "other bytes"),
    "layer is missing": (without_a_layer, NotFoundError, "lacks the layer"),
    "config is missing": (without_config, NotFoundError, "has no blobs"),
    "nested indexes": (nested, IntegrityError, "nested"),
    "truncated layer": (truncated, IntegrityError, "."),
    "layer is no tar": (lambda oci, _: oci.write_index(oci.image(b"no tar" * 999)), IntegrityError, "."),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_layout_is_one_line_and_changes_nothing(tmp_path: Path, name: str) -> None:
    breaker, kind, message = BROKEN[name]
    (tmp_path / "tree").mkdir()
    convert(tmp_path / "tree", tmp_path / "out")
    before = snapshot(tmp_path / "out")
    breaker(OciLayout(tmp_path / "oci"), tmp_path)
    with pytest.raises(kind, match=message) as caught:
        convert(tmp_path / "oci", tmp_path / "out")
    assert re.fullmatch(r"[^\n]+[^\n.]", caught.value.message)
    assert snapshot(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("missing", NotFoundError),
        ("file", UsageError),
        ("tree:tag", UsageError),
        ("tree@sha256:" + "0" * 64, UsageError),
    ],
)
def test_a_source_that_is_none(tmp_path: Path, source: str, kind: type[BootseerError]) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "tree").mkdir()
    with pytest.raises(kind):
        convert(tmp_path / source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_source_that_vanishes_meanwhile(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(tree / "sizes", tmp_path / "tree")

    def remove(stage: str, done_bytes: int, total_bytes: int) -> None:
        shutil.rmtree(tmp_path / "tree", ignore_errors=True)

    # Before the first bytes were read or after the last: an error or a whole image, never half of one.
    try:
        convert(tmp_path / "tree", tmp_path / "out", progress=remove)
    except (OSError, UsageError):
        assert not (tmp_path / "out/index.json").exists()
    else:
        fsck(unpack(str(tmp_path / "out"), tmp_path))
