"""Converting a directory or an OCI image, to the bytes that a start will read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.image._layouts import (
    CONFIG,
    DOCKER,
    OCI,
    contents,
    finish,
    for_platform,
    put,
    put_manifest,
    tagged,
)
from tests.image._oci import blob_file
from tests.image._trees import differences, disk_of, look, make_tree, mounted, write

from bootseer import native
from bootseer.core.errors import BootseerError, IntegrityError, NotFoundError, UsageError
from bootseer.image import layout
from bootseer.image.convert import ConvertedImage, convert
from bootseer.image.resolve import resolve


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("convert") / "tree"
    root.mkdir()
    make_tree(root)
    return root


@pytest.fixture(scope="module")
def layer(tree: Path) -> bytes:
    options = ["--format=posix", "--xattrs", "--xattrs-include=*", "--numeric-owner"]
    return subprocess.run(
        ["tar", *options, "-C", str(tree), "-c", "."], stdout=subprocess.PIPE, check=True
    ).stdout


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def small_tree(path: Path, name: str = "file") -> Path:
    write(path / name, b"content")
    return path


def unpack(out: Path, converted: ConvertedImage, image: Path) -> native.ChunkMap:
    """Rebuild the EROFS image from the blob as a start would, by the map alone; every digest is checked."""
    resolved = resolve(f"{out}@{converted.digest}")
    chunk_map = native.ChunkMap.parse(resolved.chunk_map)
    blob = blob_file(resolved).read_bytes()
    assert hashlib.sha256(blob).digest() == chunk_map.blob_sha256
    assert len(blob) == chunk_map.blob_bytes == resolved.blobs[0].bytes == converted.blob_bytes
    with image.open("wb") as file:
        for index in range(chunk_map.chunk_count):
            raw_offset, raw_bytes, blob_offset, blob_bytes, sha256 = chunk_map.chunk(index)
            raw = blob[blob_offset : blob_offset + blob_bytes]
            if blob_bytes == 0:
                raw = bytes(raw_bytes)
            elif blob_bytes != raw_bytes:
                raw = subprocess.run(["zstd", "-dcq"], input=raw, stdout=subprocess.PIPE, check=True).stdout
            assert file.tell() == raw_offset
            assert len(raw) == raw_bytes
            assert hashlib.sha256(raw).digest() == sha256
            file.write(raw)
    return chunk_map


def manifest_of(out: Path, converted: ConvertedImage) -> dict[str, Any]:
    return layout.read_manifest(
        layout.DirectoryStore(out),
        layout.manifest_descriptor(layout.DirectoryStore(out), None, converted.digest),
    )[1]


def test_a_directory_and_back(tree: Path, out: Path, tmp_path: Path) -> None:
    converted = convert(tree, out)
    chunk_map = unpack(out, converted, tmp_path / "image")
    assert converted.image_bytes == chunk_map.image_bytes == (tmp_path / "image").stat().st_size
    assert (converted.chunks, converted.meta_bytes) == (chunk_map.chunk_count, chunk_map.meta_bytes)
    with mounted(tmp_path / "image", tmp_path / "mnt") as seen:
        assert differences(look(seen), look(tree)) == []


def test_the_artifact(tree: Path, out: Path) -> None:
    converted = convert(tree, out, tag="v1")
    manifest = manifest_of(out, converted)
    assert manifest["artifactType"] == "application/vnd.bootseer.image.v1"
    assert manifest["annotations"] == {"dev.bootseer.format": "1"}
    assert [each["mediaType"] for each in (manifest["config"], *manifest["layers"])] == [
        "application/vnd.oci.image.config.v1+json",
        "application/vnd.bootseer.chunkmap.v1",
        "application/vnd.bootseer.chunks.v1+zstd",
    ]
    for each in (manifest["config"], *manifest["layers"]):
        path = out / layout.blob_path(each["digest"])
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
        assert path.stat().st_size == each["size"]
    assert "subject" not in manifest
    config = resolve(f"{out}:v1").config
    assert config["config"]["Cmd"] == ["/bin/sh"]
    assert config["config"]["Env"][0].startswith("PATH=/usr/local/sbin:")
    files = {path.name for path in out.iterdir()}
    assert files == {"blobs", "index.json", "oci-layout"}
    assert len(list((out / "blobs/sha256").iterdir())) == 4


@pytest.mark.parametrize("types", [OCI, DOCKER], ids=["oci", "docker"])
@pytest.mark.parametrize("kind", ["layer", "layer+gzip"])
def test_an_oci_image(
    layer: bytes, tree: Path, out: Path, tmp_path: Path, types: dict[str, str], kind: str
) -> None:
    (tmp_path / "source").mkdir()
    source = put_manifest(tmp_path / "source", [layer], types=types, kind=kind)
    finish(tmp_path / "source", [tagged(source, "latest")])
    converted = convert(tmp_path / "source", out)
    assert manifest_of(out, converted)["subject"] == source
    assert resolve(str(out)).config == CONFIG
    # The same files by another way: everything but the config is equal, down to the digests.
    direct = manifest_of(out, convert(tree, out, tag="direct"))
    assert direct["layers"] == manifest_of(out, converted)["layers"]


def test_layers_are_applied_in_order(tmp_path: Path, out: Path) -> None:
    (tmp_path / "source").mkdir()
    layers = []
    for name, data in (("first", b"1"), ("second", b"22")):
        small_tree(tmp_path / name, f"only-{name}")
        write(tmp_path / name / "both", data)
        packed = subprocess.run(
            ["tar", "-C", str(tmp_path / name), "-c", "."], stdout=subprocess.PIPE, check=True
        )
        layers.append(packed.stdout)
    finish(tmp_path / "source", [put_manifest(tmp_path / "source", layers)])
    unpack(out, convert(tmp_path / "source", out), tmp_path / "image")
    with mounted(tmp_path / "image", tmp_path / "mnt") as seen:
        assert sorted(path.name for path in seen.iterdir()) == ["both", "only-first", "only-second"]
        assert (seen / "both").read_bytes() == b"22"


def test_the_platform_of_this_machine(layer: bytes, tmp_path: Path, out: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    other = for_platform(put_manifest(source, [], config={"other": 1}), "linux/other")
    ours = put_manifest(source, [layer])
    here = for_platform(ours, f"linux/{layout.host_architecture()}")
    finish(source, [tagged(put(source, OCI["index"], {"manifests": [other, here]}), "x")])
    assert manifest_of(out, convert(source.with_name("source:x"), out))["subject"]["digest"] == ours["digest"]


def test_the_same_input_gives_the_same_digests(tree: Path, tmp_path: Path) -> None:
    first = convert(tree, tmp_path / "1", threads=1)
    subprocess.run(["cp", "-a", str(tree), str(tmp_path / "copy")], check=True)
    second = convert(tmp_path / "copy", tmp_path / "2", threads=3)
    assert first == second
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_a_changed_file_leaves_the_other_chunks(tmp_path: Path, out: Path) -> None:
    tree = tmp_path / "tree"
    data = {name: os.urandom(2 << 20) for name in ("a", "b", "c")}
    for name, content in data.items():
        write(tree / name, content)

    def chunks(tag: str) -> set[bytes]:
        resolved = resolve(f"{out}@{convert(tree, out, tag=tag).digest}")
        chunk_map = native.ChunkMap.parse(resolved.chunk_map)
        return {chunk_map.chunk(index)[4] for index in range(chunk_map.chunk_count)}

    before = chunks("before")
    write(tree / "a", data["a"] + os.urandom(8192))  # everything behind moves by two pages
    write(tree / "b", data["b"][: 1 << 20] + os.urandom(4096) + data["b"][1 << 20 :])
    after = chunks("after")
    # Metadata, the end of a, and in b the chunk that was split and perhaps its neighbours.
    assert len(after - before) <= 6
    assert len(after & before) >= len(before) - 5


def test_zeros_and_repetitions_are_not_stored(tmp_path: Path, out: Path) -> None:
    data = os.urandom(1 << 20)
    for name in ("a", "b", "c"):
        write(tmp_path / "tree" / name, data)
    write(tmp_path / "tree/zeros", bytes(8 << 20))
    converted = convert(tmp_path / "tree", out)
    assert converted.image_bytes > 11 << 20
    # Once, and the chunk at a seam, which holds the end of one file and the start of the next.
    assert converted.blob_bytes < 2 << 20


def test_a_layout_is_extended_and_a_tag_moves(tmp_path: Path, out: Path) -> None:
    one = convert(small_tree(tmp_path / "one", "one"), out, tag="a")
    two = convert(small_tree(tmp_path / "two", "two"), out, tag="b")
    assert {resolve(f"{out}:{tag}").manifest_digest for tag in "ab"} == {one.digest, two.digest}
    convert(tmp_path / "two", out, tag="a")
    assert resolve(f"{out}:a").manifest_digest == two.digest


def test_the_source_may_be_the_destination(layer: bytes, tmp_path: Path) -> None:
    source = tmp_path / "both"
    source.mkdir()
    original = put_manifest(source, [layer])
    finish(source, [tagged(original, "plain")])
    converted = convert(tmp_path / "both:plain", source, tag="lazy")
    assert resolve(f"{source}:lazy").manifest_digest == converted.digest
    with pytest.raises(UsageError, match="is converted already"):
        convert(tmp_path / "both:lazy", source, tag="again")


def test_a_directory_that_holds_the_destination(tmp_path: Path) -> None:
    tree = small_tree(tmp_path / "tree")
    (tmp_path / "link").symlink_to(tree)
    for source, destination in ((tree, tree / "out"), (tmp_path / "link", tree / "a/b"), (tree, tree)):
        with pytest.raises(UsageError, match="the image would hold itself"):
            convert(source, destination)
    assert [path.name for path in tree.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"average_chunk_bytes": 1024}, "average chunk"),
        ({"average_chunk_bytes": 2 << 20}, "average chunk"),
        ({"level": 0}, "compression level"),
        ({"level": 23}, "compression level"),
        ({"tag": "not a tag"}, "is not a tag"),
        ({"tag": ""}, "is not a tag"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, out: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        convert(small_tree(tmp_path / "tree"), out, **options)
    assert not out.exists()


def test_sources_that_cannot_be(layer: bytes, tmp_path: Path, out: Path) -> None:
    def check(error: type[BootseerError], message: str, source: Path = tmp_path / "source") -> None:
        with pytest.raises(error, match=message):
            convert(source, out)
        assert not out.exists()

    check(NotFoundError, "does not exist")
    check(UsageError, "not a directory", write(tmp_path / "file"))
    small_tree(tmp_path / "tree")
    check(UsageError, "is not an OCI layout, so it has no v1", tmp_path / "tree:v1")
    source = tmp_path / "source"
    source.mkdir()
    good = put_manifest(source, [layer])
    manifest = json.loads((source / layout.blob_path(good["digest"])).read_bytes())
    finish(source, [tagged(good, "good")])
    check(NotFoundError, "has no image bad", tmp_path / "source:bad")

    finish(source, [put(source, OCI["manifest"], {**manifest, "config": None})])
    check(IntegrityError, "has no config")
    finish(source, [put(source, OCI["manifest"], {**manifest, "layers": 7})])
    check(IntegrityError, "has no list of layers")
    chart = put(source, "application/vnd.cncf.helm.chart.content.v1.tar+gzip", layer)
    finish(source, [put(source, OCI["manifest"], {**manifest, "layers": [chart]})])
    check(UsageError, "is no container image")
    missing = {**manifest["layers"][0], "digest": "sha256:" + "0" * 64}
    finish(source, [put(source, OCI["manifest"], {**manifest, "layers": [missing]})])
    check(NotFoundError, "lacks the layer")
    finish(source, [good])
    path = source / layout.blob_path(manifest["layers"][0]["digest"])
    path.write_bytes(path.read_bytes() + b"!")
    check(IntegrityError, "holds other bytes")
    (source / layout.blob_path(manifest["config"]["digest"])).write_bytes(b"{}")
    check(IntegrityError, "holds other bytes")


def test_a_hostile_layer_leaves_nothing(tmp_path: Path, out: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    finish(source, [put_manifest(source, [b"not a tar" * 1000], kind="layer")])
    convert(small_tree(tmp_path / "tree"), out, tag="good")
    before = contents(out)
    with pytest.raises(IntegrityError):
        convert(source, out)
    assert contents(out) == before


def test_a_cancelled_conversion_leaves_nothing(tree: Path, out: Path) -> None:
    for stage in ("building", "compressing"):

        def stop(current: str, *_: object, stage: str = stage) -> None:
            if current == stage:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert(tree, out, progress=stop)
        assert not out.exists()


_SCRIPT = """
import sys
from pathlib import Path
from bootseer.image.convert import convert
convert(Path(sys.argv[1]), Path(sys.argv[2]), tag="other", level=19, threads=1)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_conversion_that_is_killed(tmp_path: Path, out: Path, number: signal.Signals) -> None:
    """Ctrl-C cleans up at once; after SIGKILL the next writer does. What was there stays in both cases."""
    convert(small_tree(tmp_path / "tree"), out, tag="good")
    before = contents(out)
    slow = tmp_path / "slow"
    write(slow / "file", b"".join(b"%d " % (index * 7919 % 1000003) for index in range(10_000_000)))
    child = subprocess.Popen([sys.executable, "-c", _SCRIPT, str(slow), str(out)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while len(list(out.glob(".tmp-*"))) < 2:  # it is at work
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    child.send_signal(number)
    assert child.wait(60) != 0
    if number == signal.SIGKILL:
        assert list(out.glob(".tmp-*"))
        layout.LayoutWriter(out)
    assert contents(out) == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk_of("12m", tmp_path / "disk") as place:
        yield place


@pytest.mark.parametrize("tree_mib", [14, 7])  # too much for the image; for image and chunks together
def test_a_full_disk(small_disk: Path, tmp_path: Path, tree_mib: int) -> None:
    out = small_disk / "out"
    convert(small_tree(tmp_path / "small"), out, tag="good")
    before = contents(out)
    write(tmp_path / "tree/file", os.urandom(tree_mib << 20))
    with pytest.raises(BootseerError, match="no space left") as caught:
        convert(tmp_path / "tree", out)
    assert caught.value.hint
    assert contents(out) == before
    shutil.rmtree(out)
    with pytest.raises(BootseerError, match="no space left"):
        convert(tmp_path / "tree", out)
    assert not out.exists()


def test_progress(tree: Path, out: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    converted = convert(tree, out, progress=lambda *call: calls.append(call))
    assert list(dict.fromkeys(stage for stage, _, _ in calls)) == ["building", "compressing"]
    assert calls[-1] == ("compressing", converted.image_bytes, converted.image_bytes)
    assert all(0 <= done <= total for _, done, total in calls)
