"""Origins, traces, maps and disks that fail, seen through a real mount."""

from __future__ import annotations

import errno
import os
import random
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests._node import Node, wait_until, write_layout
from tests.conftest import StoredImage
from tests.native.origin import Image, make_image, serve

from bootseer.core import errors
from bootseer.image.resolve import resolve

DEADLINE_S = 1.0
# Twice the deadline (when reading ahead fails the kernel asks for the page alone), and a busy machine.
PATIENCE_S = 10.0
PAGE = 4096


class Remote:
    """A mount whose chunks come over HTTP; what is in its manifest is on the node already."""

    def __init__(self, node: Node, image: StoredImage, port: int, **options: Any) -> None:
        self.node = node
        self.raw = image.raw
        digest = resolve(str(image.layout), state_dir=node.state_dir).manifest_digest
        reference = f"http://127.0.0.1:{port}/layout@{digest}"
        self.mount = node.mount(reference, deadline_s=DEADLINE_S, **options)

    def read(self, offset: int, length: int = PAGE) -> int:
        """0 when the bytes are right, else the errno. Never wrong, never late, never from the page cache."""
        began = time.monotonic()
        fd = os.open(self.mount.image_path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            data = os.pread(fd, length, offset)
        except OSError as error:
            assert error.errno is not None
            return error.errno
        finally:
            os.close(fd)
            assert time.monotonic() - began < PATIENCE_S
        assert data == self.raw[offset : offset + length]
        return 0

    def last_error(self) -> str:
        """What the statistics say about the last failed read."""
        return str(self.node.client.statistics(self.mount.id)["file.last_error"])


def far(image: StoredImage, index: int) -> int:
    """The start of the ``index``-th chunk that has bytes in the blob."""
    chunks = [image.content.map.chunk(i) for i in range(image.content.map.chunk_count)]
    return [chunk[0] for chunk in chunks if chunk[3]][index]


# ---- origins ----

TRANSPORT = {errno.EIO, errno.ETIMEDOUT}


@pytest.mark.parametrize(
    ("behaviour", "numbers", "reason"),
    [
        ("503", TRANSPORT, "503"),
        ("404", {errno.EIO, errno.ENOENT}, "404"),
        ("lie", {errno.EIO}, "sha256"),
        ("truncate", TRANSPORT, ""),
        ("reset", TRANSPORT, ""),
        ("stall", TRANSPORT, ""),
        ("wrong_range", TRANSPORT, "range"),
    ],
)
def test_a_bad_origin(node: Node, image: StoredImage, behaviour: str, numbers: set[int], reason: str) -> None:
    with serve(image.content.blob) as origin:
        remote = Remote(node, image, origin.port)
        assert remote.read(far(image, 0)) == 0
        origin.default = behaviour
        assert remote.read(far(image, 120)) in numbers
        message = remote.last_error()
        assert message
        assert "\n" not in message
        assert reason in message.lower()
        assert node.client.mounts() == [remote.mount]
        assert remote.read(far(image, 0)) == 0  # what was fetched before is still there
        origin.default = "ok"
        wait_until(lambda: remote.read(far(image, 120)) == 0, "the mount recovers with its origin")


def test_a_whole_blob_for_a_range_gives_right_bytes_or_an_error(node: Node, image: StoredImage) -> None:
    with serve(image.content.blob, "whole") as origin:
        remote = Remote(node, image, origin.port)
        assert {remote.read(far(image, index)) for index in (0, 60, 120)} <= {0, *TRANSPORT}
        origin.default = "ok"
        wait_until(lambda: remote.read(far(image, 120)) == 0, "the mount recovers with its origin")


def test_an_origin_that_is_down(node: Node, image: StoredImage) -> None:
    with serve(image.content.blob) as origin:
        port = origin.port
    remote = Remote(node, image, port)  # the manifest is known, so mounting needs no origin
    assert remote.read(far(image, 100)) in TRANSPORT
    assert "127.0.0.1" in remote.last_error() or "connect" in remote.last_error().lower()
    with serve(image.content.blob, port=port):
        wait_until(lambda: remote.read(far(image, 100)) == 0, "the mount recovers with its origin")


def test_a_slow_origin_is_waited_for(node: Node, image: StoredImage) -> None:
    with serve(image.content.blob) as origin:
        origin.delay_s = 0.3
        remote = Remote(node, image, origin.port)
        assert remote.read(far(image, 150)) == 0


def test_every_second_answer_is_bad(node: Node, image: StoredImage) -> None:
    rng = random.Random(11)
    bad = ["truncate", "reset", "short", "503", "wrong_range"]
    behaviours = [rng.choice(bad) if index % 2 else "ok" for index in range(400)]
    with serve(image.content.blob, behaviours=behaviours) as origin:
        remote = Remote(node, image, origin.port)
        for offset in range(0, len(image.raw) - 65536, 65536):
            assert remote.read(offset, 65536) == 0, remote.last_error()


def test_readers_under_a_changing_origin(node: Node, image: StoredImage) -> None:
    results: list[int] = []
    with serve(image.content.blob) as origin:
        remote = Remote(node, image, origin.port)
        stop = threading.Event()

        def read(seed: int) -> None:
            rng = random.Random(seed)
            while not stop.is_set():
                results.append(remote.read(rng.randrange(len(image.raw) // PAGE) * PAGE))

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        try:
            for behaviour in ["reset", "ok", "lie", "503", "truncate", "ok", "stall", "wrong_range", "ok"]:
                origin.default = behaviour
                before = len(results)
                wait_until(lambda: len(results) >= before + 4, f"readers go on ({behaviour})", 60)  # noqa: B023
        finally:
            stop.set()
            for thread in threads:
                thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in threads)
        assert set(results) <= {0, *TRANSPORT}
        assert 0 in results
        wait_until(lambda: remote.read(0, len(image.raw)) == 0, "every byte can be read again")


def test_a_worker_killed_while_its_readers_wait_for_the_origin(node: Node, image: StoredImage) -> None:
    with serve(image.content.blob, "stall") as origin:
        remote = Remote(node, image, origin.port)
        results: list[int] = []
        thread = threading.Thread(target=lambda: results.append(remote.read(far(image, 80))))
        thread.start()
        wait_until(lambda: origin.requests, "the read has reached the origin")
        origin.default = "ok"
        os.kill(remote.mount.worker_pid, 9)
        thread.join(30)
        assert results == [0]


def test_a_stuck_origin_does_not_hold_up_an_unmount(node: Node, image: StoredImage) -> None:
    with serve(image.content.blob, "stall") as origin:
        remote = Remote(node, image, origin.port, prefetch=True, background_fill=True)
        assert remote.read(far(image, 80)) in TRANSPORT
        node.client.unmount(remote.mount.id)
        assert node.mounts() == []
        wait_until(lambda: remote.mount.worker_pid not in node.workers(), "its worker ends")


# ---- traces ----


@pytest.mark.parametrize("damage", ["empty", "garbage", "cut", "flipped", "a directory"])
def test_a_damaged_trace_does_not_stop_a_mount(node: Node, image: StoredImage, damage: str) -> None:
    mount = node.mount(image.layout, record=True)
    assert Path(mount.image_path).read_bytes() == image.raw
    node.client.tell(mount.id, "ready")
    node.client.unmount(mount.id)
    (trace,) = (node.state_dir / "traces").rglob("*.trace")
    whole = trace.read_bytes()
    content = {
        "empty": b"",
        "garbage": b"garbage" * 100,
        "cut": whole[: len(whole) // 2 + 3],
        "flipped": bytes(byte ^ 0x10 for byte in whole),
        "a directory": b"",
    }[damage]
    if damage == "a directory":
        trace.unlink()
        trace.mkdir()
    else:
        trace.write_bytes(content)
    again = node.mount(image.layout, record=True, prefetch=True)
    assert Path(again.image_path).read_bytes() == image.raw


def test_a_trace_store_that_cannot_be_written(node: Node, image: StoredImage) -> None:
    traces = node.state_dir / "traces"
    traces.rmdir()
    traces.write_text("in the way")
    mount = node.mount(image.layout, record=True, prefetch=True)
    assert Path(mount.image_path).read_bytes() == image.raw
    assert mount.trace_path == ""
    assert node.client.status().fallbacks["trace_store"] == 1


# ---- hostile chunk maps ----

HEADER_BYTES = 96
ENTRY = struct.Struct("<QQII32s")


def crc32c(data: bytes | bytearray) -> int:
    """Bit by bit: an independent implementation, for small maps."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def sealed(data: bytearray) -> bytes:
    """With a right checksum, so that only the rule in question is broken."""
    data[92:96] = bytes(4)
    data[92:96] = crc32c(data).to_bytes(4, "little")
    return bytes(data)


def with_entry(data: bytearray, index: int, change: Callable[[list[int]], None]) -> None:
    at = HEADER_BYTES + index * ENTRY.size
    *numbers, digest = ENTRY.unpack_from(data, at)
    change(numbers)
    ENTRY.pack_into(data, at, *numbers, digest)


def put(position: int, value: int) -> Callable[[list[int]], None]:
    def change(numbers: list[int]) -> None:
        numbers[position] = value

    return change


RAW_OFFSET, BLOB_OFFSET, RAW_BYTES, BLOB_BYTES = range(4)
HOSTILE: dict[str, Callable[[bytearray], None]] = {
    "overlap in the image": lambda data: with_entry(data, 2, put(RAW_OFFSET, 0)),
    "overlap in the blob": lambda data: with_entry(data, 5, put(BLOB_OFFSET, 1)),
    "out of the blob": lambda data: with_entry(data, 5, put(BLOB_OFFSET, 1 << 40)),
    "wraps around": lambda data: with_entry(data, 5, put(BLOB_OFFSET, (1 << 64) - 1)),
    "a chunk of 4 GiB": lambda data: with_entry(data, 5, put(RAW_BYTES, 0xFFFFF000)),
    "a chunk of nothing": lambda data: with_entry(data, 5, put(RAW_BYTES, 0)),
    "a frame that cannot be that long": lambda data: with_entry(data, 5, put(BLOB_BYTES, 0x7FFFFFFF)),
    "zeros with another digest": lambda data: with_entry(data, 5, put(BLOB_BYTES, 0)),
    "an image of 8 EiB": lambda data: struct.pack_into("<Q", data, 16, 1 << 63),
    "metadata beyond the image": lambda data: struct.pack_into("<Q", data, 24, 1 << 50),
    "4 billion chunks": lambda data: struct.pack_into("<I", data, 72, 0xFFFFFFFF),
    "another version": lambda data: struct.pack_into("<I", data, 8, 2),
    "a flag": lambda data: struct.pack_into("<I", data, 76, 1),
    "cut": lambda data: data.__delitem__(slice(len(data) - 30, None)),
    "too long": lambda data: data.extend(b"more"),
    "not a map": lambda data: data.__setitem__(slice(0, 8), b"ELF\0\0\0\0\0"),
}


@pytest.fixture(scope="module")
def small() -> Image:
    return make_image(24, seed=3)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_chunk_map(api: Node, small: Image, tmp_path: Path, name: str) -> None:
    data = bytearray(small.map.serialize())
    assert sealed(bytearray(data)) == bytes(data)
    HOSTILE[name](data)
    path = write_layout(tmp_path / "layout", small, chunk_map=sealed(data))
    with pytest.raises(errors.IntegrityError) as caught:
        api.mount(path)
    assert "\n" not in caught.value.message
    assert api.client.mounts() == []
    assert api.mounts() == []
    assert list((api.run_dir / "mounts").iterdir()) == []


def test_a_frame_that_expands_to_more_than_the_map_says(node: Node, small: Image, tmp_path: Path) -> None:
    data = bytearray(small.map.serialize())
    # The first chunk is compressed; say that it makes one page less, and the image with it is another one.
    raw_offset, raw_bytes, *_ = small.map.chunk(0)
    assert raw_bytes > PAGE
    struct.pack_into("<Q", data, 16, len(small.raw) - PAGE)
    with_entry(data, 0, put(RAW_BYTES, raw_bytes - PAGE))
    for index in range(1, small.map.chunk_count):
        with_entry(data, index, put(RAW_OFFSET, small.map.chunk(index)[0] - PAGE))
    path = write_layout(tmp_path / "layout", small, chunk_map=sealed(data))
    mount = node.mount(path, deadline_s=DEADLINE_S)
    fd = os.open(mount.image_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Input/output error"):
            os.pread(fd, PAGE, raw_offset)
        second = small.map.chunk(1)[0]
        assert os.pread(fd, PAGE, second - PAGE) == small.raw[second : second + PAGE]
    finally:
        os.close(fd)
    assert node.client.statistics(mount.id)["file.last_error"]


# ---- images that are not what they say ----


def test_a_layout_whose_map_has_another_digest(node: Node, small: Image, tmp_path: Path) -> None:
    path = write_layout(tmp_path / "layout", small)
    for blob in (path / "blobs" / "sha256").iterdir():
        if blob.read_bytes()[:8] == b"BSRCMAP1":
            blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    with pytest.raises(errors.IntegrityError, match="holds other bytes"):
        node.mount(path)
    assert node.mounts() == []


def test_a_layout_whose_chunks_are_gone(node: Node, small: Image, tmp_path: Path) -> None:
    path = write_layout(tmp_path / "layout", small)
    (path / "blobs" / "sha256" / small.key).unlink()
    with pytest.raises(errors.NotFoundError) as caught:
        node.mount(path)
    assert small.key in caught.value.message
    assert node.mounts() == []
