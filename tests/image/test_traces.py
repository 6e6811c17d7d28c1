"""Recordings of starts: which are kept, which are believed, and the plan that they make."""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import time
from pathlib import Path

import pytest

from bootseer import native
from bootseer.image.traces import KEEP, MERGED, TraceStore

DIGEST = "sha256:" + "ab" * 32
OTHER = "sha256:" + "cd" * 32
CHUNK = 1 << 20


def crc32c(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def checked(data: bytes) -> bytes:
    return data + struct.pack("<I", crc32c(data))


def trace(*uses: tuple[int, int], image_bytes: int = 8 * CHUNK) -> bytes:
    """A recording of (offset, time in ns), by docs/formats/trace.md."""
    header = struct.pack("<8sIIIIQQ20x", b"BSRTRCE1", 1, 64, 32, 0, 5, image_bytes)
    records = [checked(struct.pack("<QIIQI", offset, 4096, 77, t_ns, 0)) for offset, t_ns in uses]
    return checked(header) + b"".join(records)


@pytest.fixture
def chunk_map() -> native.ChunkMap:
    """Eight stored chunks of 1 MiB; the fourth is zeros and never fetched."""
    digest = hashlib.sha256(b"x").digest()
    zeros = hashlib.sha256(bytes(CHUNK)).digest()
    entries = [
        (n * CHUNK, CHUNK, 0, 0, zeros) if n == 3 else (n * CHUNK, CHUNK, n * CHUNK, CHUNK, digest)
        for n in range(8)
    ]
    return native.ChunkMap(8 * CHUNK, 0, 8 * CHUNK, digest, entries)


@pytest.fixture
def store(tmp_path: Path) -> TraceStore:
    return TraceStore(tmp_path)


def record(store: TraceStore, data: bytes, mount_id: str = "m", digest: str = DIGEST) -> Path:
    path = store.recording_path(digest, mount_id)
    path.write_bytes(data)
    return path


def make_old(path: Path) -> None:
    """What is young may be in the making."""
    hour_ago = time.time() - 3600
    os.utime(path, (hour_ago, hour_ago))


def test_nothing_was_recorded(store: TraceStore, chunk_map: native.ChunkMap) -> None:
    assert store.recordings(DIGEST) == []
    assert store.merged(DIGEST) is None
    assert store.plan(DIGEST, chunk_map) == []
    assert store.digests() == []


def test_recordings_keep_their_order_and_images_apart(store: TraceStore) -> None:
    paths = [record(store, trace((0, n)), f"mount{n}") for n in range(3)]
    record(store, trace((0, 9)), digest=OTHER)
    assert store.paths(DIGEST) == paths
    assert [t.records()[0][3] for t in store.recordings(DIGEST)] == [0, 1, 2]
    assert store.digests() == [DIGEST, OTHER]


def test_the_oldest_are_dropped(store: TraceStore) -> None:
    paths = [record(store, trace((0, n))) for n in range(KEEP + 5)]
    assert store.paths(DIGEST) == paths[-KEEP:]


def test_the_last_ones_make_the_plan(store: TraceStore, chunk_map: native.ChunkMap) -> None:
    for n in range(MERGED + 2):
        record(store, trace((n * CHUNK, 100 + n)))
    # Chunk 3 is zeros: nothing to fetch.
    assert store.plan(DIGEST, chunk_map) == [(2, 102), (4, 104)]


def test_the_plan_is_in_order_of_first_use(store: TraceStore, chunk_map: native.ChunkMap) -> None:
    record(store, trace((5 * CHUNK, 10), (0, 20), (7 * CHUNK, 30)))
    record(store, trace((7 * CHUNK, 5), (CHUNK, 15), (0, 40)))
    assert store.plan(DIGEST, chunk_map) == [(7, 5), (5, 10), (1, 15), (0, 20)]


def test_a_read_over_an_edge_means_both_chunks(store: TraceStore, chunk_map: native.ChunkMap) -> None:
    record(store, trace((CHUNK - 100, 10)))
    assert store.plan(DIGEST, chunk_map) == [(0, 10), (1, 10)]


def test_recordings_of_another_image_size_do_no_harm(store: TraceStore, chunk_map: native.ChunkMap) -> None:
    record(store, trace((100 * CHUNK, 1), (0, 2), image_bytes=200 * CHUNK))
    assert store.plan(DIGEST, chunk_map) == [(0, 2)]


def test_empty_recordings_do_not_count(store: TraceStore) -> None:
    """A mount that nothing was read from says nothing about the image."""
    for n in range(MERGED):
        record(store, trace((n * CHUNK, n)))
    record(store, trace())
    record(store, trace())
    assert len(store.recordings(DIGEST)) == MERGED


@pytest.mark.parametrize("data", [b"", b"BSRTRCE1", b"\xff" * 200, trace((0, 1))[:63], bytes(4096)])
def test_a_damaged_recording_is_dropped(
    store: TraceStore, chunk_map: native.ChunkMap, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    record(store, trace((0, 7)))
    damaged = record(store, data)
    make_old(damaged)
    with caplog.at_level(logging.WARNING):
        assert store.plan(DIGEST, chunk_map) == [(0, 7)]
    assert not damaged.exists()
    assert [entry.levelname for entry in caplog.records] == ["WARNING"]
    assert damaged.name in caplog.text


def test_one_that_is_just_beginning_is_left_alone(store: TraceStore, chunk_map: native.ChunkMap) -> None:
    record(store, trace((0, 7)))
    young = record(store, b"")
    assert store.plan(DIGEST, chunk_map) == [(0, 7)]
    assert young.exists()


def test_what_was_written_before_a_crash_counts(store: TraceStore, chunk_map: native.ChunkMap) -> None:
    record(store, trace((0, 1), (CHUNK, 2), (2 * CHUNK, 3))[:-5])
    assert store.plan(DIGEST, chunk_map) == [(0, 1), (1, 2)]


def test_one_that_cannot_be_read_is_left_out(
    store: TraceStore, chunk_map: native.ChunkMap, caplog: pytest.LogCaptureFixture
) -> None:
    record(store, trace((0, 7)))
    odd = store.recording_path(DIGEST, "odd")
    odd.mkdir()
    with caplog.at_level(logging.WARNING):
        assert store.plan(DIGEST, chunk_map) == [(0, 7)]
    assert odd.is_dir()
    assert odd.name in caplog.text


def test_other_files_are_none_of_ours(store: TraceStore, tmp_path: Path) -> None:
    path = record(store, trace((0, 1)))
    path.with_suffix(".txt").write_text("note")
    (tmp_path / "traces/file").write_text("note")
    assert store.paths(DIGEST) == [path]
    assert store.digests() == [DIGEST]


def test_a_recording_of_a_real_start(store: TraceStore, tmp_path: Path) -> None:
    """What the data plane writes is what this module reads."""
    data = os.urandom(4 * CHUNK)
    entries = [
        (n * CHUNK, CHUNK, n * CHUNK, CHUNK, hashlib.sha256(data[n * CHUNK : (n + 1) * CHUNK]).digest())
        for n in range(4)
    ]
    (tmp_path / "blob").write_bytes(data)
    chunk_map = native.ChunkMap(4 * CHUNK, 0, 4 * CHUNK, hashlib.sha256(data).digest(), entries)
    cache = native.Cache(str(tmp_path / "cache"))
    file = native.BlockFile(
        cache,
        hashlib.sha256(data).hexdigest(),
        chunk_map,
        native.open_source(str(tmp_path / "blob")),
        trace_path=str(store.recording_path(DIGEST, "mount")),
        background_fill=False,
    )
    for chunk in (2, 0, 2, 3):
        assert file.pread(chunk * CHUNK, 100) == data[chunk * CHUNK : chunk * CHUNK + 100]
    file.mark_ready()
    file.pread(CHUNK, 100)  # after the start
    file.close()
    cache.close()
    plan = store.plan(DIGEST, chunk_map)
    assert [chunk for chunk, _ in plan] == [2, 0, 3]
    assert [t_ns for _, t_ns in plan] == sorted(t_ns for _, t_ns in plan)
    assert store.recordings(DIGEST)[0].is_finished
