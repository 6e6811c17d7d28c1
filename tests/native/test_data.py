"""Source, cache and block file against a real HTTP server, healthy and not."""

from __future__ import annotations

import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.native.origin import Image, flip, make_image, serve

from bootseer.core.errors import (
    BackendUnavailableError,
    BootseerError,
    IntegrityError,
    NotFoundError,
    TimeoutExpiredError,
    UsageError,
)
from bootseer.native import _core

LOG_HEADER_BYTES = 64
LOG_RECORD_BYTES = 16


@pytest.fixture(scope="module")
def image() -> Image:
    return make_image()


@contextmanager
def open_file(
    directory: Path,
    image: Image,
    uri: str,
    *,
    retries: int = 2,
    sync_interval_s: float = 60.0,
    **options: Any,
) -> Iterator[_core.BlockFile]:
    options.setdefault("background_fill", False)
    cache = _core.Cache(str(directory), sync_interval_s=sync_interval_s)
    source = _core.open_source(uri, retries=retries, connect_timeout_s=1.0)
    file = _core.BlockFile(cache, image.key, image.map, source, **options)
    try:
        yield file
    finally:
        file.close()
        cache.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        time.sleep(0.002)


def whole_plan(image: Image) -> list[tuple[int, int]]:
    return [(chunk, chunk) for chunk in range(image.map.chunk_count)]


# ---- a healthy origin ----


def test_every_read_is_right(tmp_path: Path, image: Image) -> None:
    rng = random.Random(5)
    with serve(image.blob) as origin, open_file(tmp_path, image, origin.url) as file:
        assert file.size_bytes == len(image.raw)
        for _ in range(300):
            offset = rng.randrange(len(image.raw) + 100)
            length = rng.randrange(1, 200_000)
            assert file.pread(offset, length) == image.raw[offset : offset + length]
        assert file.pread(len(image.raw), 10) == b""


def test_each_byte_is_asked_for_once(tmp_path: Path, image: Image) -> None:
    with serve(image.blob) as origin, open_file(tmp_path, image, origin.url) as file:
        threads = [threading.Thread(target=lambda: file.pread(0, len(image.raw))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(last - first + 1 for first, last in origin.requests) == len(image.blob)


def test_prefetch_brings_the_plan_in_its_order(tmp_path: Path, image: Image) -> None:
    plan = whole_plan(image)
    random.Random(3).shuffle(plan)
    with serve(image.blob) as origin, open_file(tmp_path, image, origin.url) as file:
        file.prefetch(plan)
        wait_until(lambda: file.ready_bytes() == len(image.raw))
        assert file.statistics()["demand_requests"] == 0
        assert file.pread(0, len(image.raw)) == image.raw
        statistics = file.statistics()
        assert statistics["coverage"] == 1.0
        assert statistics["precision"] == 1.0
        assert statistics["misses"] == 0


def test_a_read_that_meets_its_prefetch_waits_for_it(tmp_path: Path, image: Image) -> None:
    with serve(image.blob) as origin, open_file(tmp_path, image, origin.url) as file:
        origin.delay_s = 0.3
        file.prefetch(whole_plan(image))
        assert file.pread(0, 5000) == image.raw[:5000]
        statistics = file.statistics()
        assert statistics["lateness_count"] == 1
        assert float(statistics["lateness_p50_ns"]) > 0
        assert statistics["demand_requests"] == 0
        assert sum(last - first + 1 for first, last in origin.requests) <= len(image.blob)


def test_background_fill_completes_the_file_once_ready(tmp_path: Path, image: Image) -> None:
    with serve(image.blob) as origin, open_file(tmp_path, image, origin.url, background_fill=True) as file:
        assert file.pread(0, 100) == image.raw[:100]
        file.mark_ready()
        wait_until(file.is_complete)
        assert float(file.statistics()["background_bytes"]) > 0
        assert Path(file.local_path()).read_bytes() == image.raw


def test_sequential_misses_are_read_ahead(tmp_path: Path, image: Image) -> None:
    with serve(image.blob) as origin, open_file(tmp_path, image, origin.url) as file:
        for chunk in range(image.map.chunk_count):
            raw_offset = image.map.chunk(chunk)[0]
            file.pread(raw_offset, 100)
        assert float(file.statistics()["read_ahead_bytes"]) > 0
        assert len(origin.requests) < image.map.chunk_count - 8


def test_a_local_file_is_an_origin_too(tmp_path: Path, image: Image) -> None:
    blob = tmp_path / "the blob"
    blob.write_bytes(image.blob)
    for uri in (str(blob), f"file://{tmp_path}/the%20blob"):
        with open_file(tmp_path / "cache" / uri.replace("/", "_"), image, uri) as file:
            assert file.pread(0, len(image.raw)) == image.raw


def test_equal_chunks_share_one_fetch(tmp_path: Path) -> None:
    base = make_image(4, compressed=1)
    entries = [base.map.chunk(i) for i in range(3)]
    raw = base.raw[: entries[2][0] + entries[2][1]]
    twin = (len(raw), *entries[1][1:])
    twins = _core.ChunkMap(
        len(raw) + entries[1][1], 0, len(base.blob), base.map.blob_sha256, [*entries, twin]
    )
    image = Image(raw + base.raw[entries[1][0] : entries[1][0] + entries[1][1]], base.blob, twins)
    with serve(image.blob) as origin, open_file(tmp_path, image, origin.url) as file:
        assert file.pread(0, len(image.raw)) == image.raw
        wait_until(file.is_complete)  # readers are answered before the disk write
        asked = sum(last - first + 1 for first, last in origin.requests)
        assert asked == sum(entry[3] for entry in entries)


# ---- what the origin can do wrong ----

RECOVERABLE = ["truncate", "reset", "503", "retry_after:0", "lie", "wrong_range", "no_range", "long", "short"]


@pytest.mark.parametrize("behaviour", RECOVERABLE)
def test_one_bad_answer_is_survived(tmp_path: Path, image: Image, behaviour: str) -> None:
    with (
        serve(image.blob, behaviours=[behaviour, behaviour]) as origin,
        open_file(tmp_path, image, origin.url) as file,
    ):
        assert file.pread(0, len(image.raw)) == image.raw


def test_a_retry_asks_only_for_the_rest(image: Image) -> None:
    with serve(image.blob, behaviours=["truncate"]) as origin:
        assert _core.open_source(origin.url).read(10, 10_000) == image.blob[10:10_010]
        (first, second) = origin.requests
        assert first == (10, 10_009)
        assert second == (5010, 10_009)


ERRORS: list[tuple[str, type[BootseerError], str]] = [
    ("truncate", BackendUnavailableError, "short_body"),
    ("short", BackendUnavailableError, "short_body"),
    ("long", BackendUnavailableError, "long_body"),
    ("whole", BackendUnavailableError, "range_ignored"),
    ("wrong_range", BackendUnavailableError, "wrong_range"),
    ("no_range", BackendUnavailableError, "wrong_range"),
    ("encoded", BackendUnavailableError, "bad_encoding"),
    ("reset", BackendUnavailableError, "reset"),
    ("503", BackendUnavailableError, "http_status"),
    ("403", BackendUnavailableError, "http_status"),
    ("404", BackendUnavailableError, "not_found"),
    ("lie", IntegrityError, "digest_mismatch"),
]


@pytest.mark.parametrize(("behaviour", "error", "reason"), ERRORS)
def test_a_bad_origin_is_an_error_with_a_reason_and_never_wrong_bytes(
    tmp_path: Path, image: Image, behaviour: str, error: type[BootseerError], reason: str
) -> None:
    chunk = next(i for i in range(4, 24) if image.map.chunk(i)[3])  # stored: a lie has to be found by digest
    offset, length = image.map.chunk(chunk)[:2]
    with serve(image.blob, behaviour) as origin, open_file(tmp_path, image, origin.url) as file:
        with pytest.raises(error) as caught:
            file.pread(offset, length)
        assert "\n" not in str(caught.value)
        statistics = file.statistics()
        assert float(statistics[f"error_{reason}"]) >= 1
        assert str(statistics["last_error"]).startswith(f"{reason}: ")
        # It heals by itself.
        origin.default = "ok"
        assert file.pread(0, len(image.raw)) == image.raw


def test_a_frame_that_does_not_decompress_is_an_integrity_error(tmp_path: Path, image: Image) -> None:
    offset, length = image.map.chunk(0)[:2]
    with serve(image.blob, "lie") as origin, open_file(tmp_path, image, origin.url) as file:
        with pytest.raises(IntegrityError):
            file.pread(offset, length)
        assert float(file.statistics()["error_bad_frame"]) >= 1


def test_an_unannounced_long_body_is_an_error(image: Image) -> None:
    with (
        serve(image.blob, "long_chunked") as origin,
        pytest.raises(BackendUnavailableError, match="more bytes"),
    ):
        _core.open_source(origin.url, retries=0).read(0, 100)


def test_origin_down(tmp_path: Path, image: Image) -> None:
    with serve(image.blob) as origin:
        url = origin.url
    with open_file(tmp_path, image, url) as file:
        with pytest.raises(BackendUnavailableError):
            file.pread(0, 10)
        assert file.statistics()["error_connect"] == 1


def test_cached_bytes_need_no_origin(tmp_path: Path, image: Image) -> None:
    with serve(image.blob) as origin:
        url = origin.url
        with open_file(tmp_path, image, url) as file:
            file.pread(0, len(image.raw))
    with open_file(tmp_path, image, url) as file:
        assert file.is_complete()
        assert file.pread(0, len(image.raw)) == image.raw


def test_a_silent_origin_costs_the_deadline_and_no_more(tmp_path: Path, image: Image) -> None:
    with serve(image.blob, "stall") as origin, open_file(tmp_path, image, origin.url, deadline_s=0.3) as file:
        with pytest.raises(TimeoutExpiredError):
            file.pread(0, len(image.raw))
        assert file.statistics()["error_deadline"] == 1
        assert file.statistics()["parked_reads"] == 0


def test_silence_within_an_answer_is_a_timeout_that_is_retried(image: Image) -> None:
    with serve(image.blob, behaviours=["stall"]) as origin:
        source = _core.open_source(origin.url, connect_timeout_s=0.5)
        assert source.read(0, len(image.blob)) == image.blob
        assert len(origin.requests) == 2


def test_retry_after_is_honoured(image: Image) -> None:
    with serve(image.blob, behaviours=["retry_after:1"]) as origin:
        started = time.monotonic()
        assert _core.open_source(origin.url).read(0, 100) == image.blob[:100]
        assert time.monotonic() - started >= 1.0


def test_close_wakes_waiting_readers(tmp_path: Path, image: Image) -> None:
    with serve(image.blob, "stall") as origin, open_file(tmp_path, image, origin.url) as file:
        errors: list[BaseException] = []

        def read() -> None:
            try:
                file.pread(0, len(image.raw))
            except BackendUnavailableError as error:
                errors.append(error)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: file.statistics()["parked_reads"] == 4)
        file.close()
        for thread in threads:
            thread.join()
        assert len(errors) == 4
        with pytest.raises(BackendUnavailableError):
            file.pread(0, len(image.raw))


def test_prefetch_resumes_when_the_origin_is_back(tmp_path: Path, image: Image) -> None:
    with (
        serve(image.blob, "503") as origin,
        open_file(tmp_path, image, origin.url, retries=0) as file,
    ):
        file.prefetch(whole_plan(image))
        wait_until(lambda: int(file.statistics()["errors"]) > 0)
        origin.default = "ok"
        wait_until(lambda: file.ready_bytes() == len(image.raw))


# ---- requests ----


def test_headers_go_out_and_secrets_stay_in(image: Image) -> None:
    with serve(image.blob, behaviours=["ok", "403"]) as origin:
        url = f"http://user:secret@127.0.0.1:{origin.port}/blob?token=secret"
        source = _core.open_source(url, headers={"X-Test": "yes", "X-Empty": ""})
        source.read(0, 1)
        assert origin.headers[0]["X-Test"] == "yes"
        assert origin.headers[0]["X-Empty"] == ""
        assert "secret" not in str(source)
        with pytest.raises(BackendUnavailableError) as caught:
            source.read(0, 1)
        assert "secret" not in str(caught.value)


def test_connections_are_reused(image: Image) -> None:
    with serve(image.blob) as origin:
        source = _core.open_source(origin.url)
        for _ in range(20):
            source.read(0, 100)
        ports = {header.get("Host") for header in origin.headers}
        assert len(ports) == 1


def test_redirects_are_followed_a_few_times(image: Image) -> None:
    with serve(image.blob) as target, serve(image.blob, behaviours=["redirect"]) as origin:
        origin.redirect_to = target.url
        assert _core.open_source(origin.url).read(5, 100) == image.blob[5:105]
    with serve(image.blob, "redirect") as origin:
        origin.redirect_to = origin.url
        with pytest.raises(BackendUnavailableError):
            _core.open_source(origin.url, retries=0).read(0, 10)
        assert len(origin.requests) == 6
        origin.redirect_to = "file:///etc/passwd"
        with pytest.raises(BackendUnavailableError):
            _core.open_source(origin.url, retries=0).read(0, 10)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tls") / "origin.pem"
    subprocess.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=origin "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {path} -out {path}.crt".split(),
        check=True,
        capture_output=True,
    )
    path.write_bytes(path.read_bytes() + Path(f"{path}.crt").read_bytes())
    return path


def test_tls(image: Image, certificate: Path) -> None:
    with serve(image.blob, certificate=certificate) as origin:
        trusting = _core.open_source(origin.url, ca_file=str(certificate))
        assert trusting.read(3, 1000) == image.blob[3:1003]
        with pytest.raises(BackendUnavailableError, match="certificate"):
            _core.open_source(origin.url, retries=0).read(0, 10)


def test_encryption_is_never_dropped_by_a_redirect(image: Image, certificate: Path) -> None:
    with (
        serve(image.blob) as plain,
        serve(image.blob, "redirect", certificate=certificate) as origin,
    ):
        origin.redirect_to = plain.url
        with pytest.raises(BackendUnavailableError):
            _core.open_source(origin.url, ca_file=str(certificate)).read(0, 10)
        assert plain.requests == []
        assert len(origin.requests) == 1


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        _core.open_source("ftp://host/blob")
    with pytest.raises(UsageError):
        _core.open_source("http://host/blob", headers={"A": "b\r\nC: d"})
    with pytest.raises(UsageError):
        _core.open_source("http://host/blob", max_connections=0)
    with pytest.raises(NotFoundError):
        _core.open_source(str(tmp_path / "nothing"))
    with pytest.raises(UsageError):
        _core.open_source(str(tmp_path))


# ---- the cache on disk ----


def blob_dir(directory: Path, image: Image) -> Path:
    return directory / "blobs" / image.key


def fill(directory: Path, image: Image) -> None:
    with serve(image.blob) as origin, open_file(directory, image, origin.url) as file:
        file.pread(0, len(image.raw))


def test_damaged_data_is_fetched_again(tmp_path: Path, image: Image) -> None:
    fill(tmp_path, image)
    victims = [i for i in range(image.map.chunk_count) if image.map.chunk(i)[3]][:6]
    for chunk in victims:
        flip(blob_dir(tmp_path, image) / "data", image.map.chunk(chunk)[0] + 17)
    with serve(image.blob) as origin, open_file(tmp_path, image, origin.url) as file:
        assert file.pread(0, len(image.raw)) == image.raw
        assert file.statistics()["fallback_cache_corrupt"] == len(victims)
        asked = sum(last - first + 1 for first, last in origin.requests)
        assert asked == sum(image.map.chunk(chunk)[3] for chunk in victims)
    assert (blob_dir(tmp_path, image) / "data").read_bytes() == image.raw


def test_damaged_zeros_are_still_zeros(tmp_path: Path, image: Image) -> None:
    fill(tmp_path, image)
    offset, length = image.map.chunk(3)[:2]
    assert image.map.chunk(3)[3] == 0
    flip(blob_dir(tmp_path, image) / "data", offset + 5)
    with serve(image.blob) as origin, open_file(tmp_path, image, origin.url) as file:
        assert file.pread(offset - 10, length + 20) == image.raw[offset - 10 : offset + length + 10]


def test_a_log_cut_anywhere_never_gives_wrong_bytes(tmp_path: Path, image: Image) -> None:
    """Power cut: some prefix of the log survived, and any of the unproven data may be lost."""
    fill(tmp_path, image)
    place = blob_dir(tmp_path, image)
    log = (place / "ready.log").read_bytes()
    rng = random.Random(11)
    with serve(image.blob) as origin:
        for cut in range(0, len(log) + 1, 7):
            (place / "ready.log").write_bytes(log[:cut])
            data = bytearray(image.raw)
            lost = rng.randrange(len(data))
            data[lost : lost + 30_000] = bytes(len(data[lost : lost + 30_000]))
            (place / "data").write_bytes(data)
            with open_file(tmp_path, image, origin.url) as file:
                assert file.pread(0, len(image.raw)) == image.raw, cut


def test_a_torn_log_costs_no_fetch_when_the_data_is_right(tmp_path: Path, image: Image) -> None:
    fill(tmp_path, image)
    log = blob_dir(tmp_path, image) / "ready.log"
    log.write_bytes(log.read_bytes()[: LOG_HEADER_BYTES + 5 * LOG_RECORD_BYTES + 3])
    with serve(image.blob) as origin, open_file(tmp_path, image, origin.url) as file:
        assert not file.is_complete()
        assert file.pread(0, len(image.raw)) == image.raw
        assert origin.requests == []
        assert file.statistics()["cache_log_dropped_bytes"] == 3


def test_another_map_for_the_same_key_never_mixes(tmp_path: Path, image: Image) -> None:
    fill(tmp_path, image)
    other = make_image(seed=2)
    with serve(other.blob) as origin:
        cache = _core.Cache(str(tmp_path))
        file = _core.BlockFile(cache, image.key, other.map, _core.open_source(origin.url))
        assert file.pread(0, len(other.raw)) == other.raw
        # While it is in use, the first map is refused.
        with pytest.raises(UsageError, match="another chunk map"):
            _core.BlockFile(cache, image.key, image.map, _core.open_source(origin.url))
        file.close()


def test_two_files_share_what_either_fetches(tmp_path: Path, image: Image) -> None:
    with (
        serve(image.blob) as origin,
        open_file(tmp_path, image, origin.url) as one,
        open_file(tmp_path, image, origin.url) as two,
    ):
        half = len(image.raw) // 2
        assert one.pread(0, half) == image.raw[:half]
        asked = len(origin.requests)
        assert two.pread(0, half) == image.raw[:half]
        assert len(origin.requests) == asked
        assert two.pread(half, half + 1) == image.raw[half:]
        assert one.pread(half, half + 1) == image.raw[half:]
        assert sum(last - first + 1 for first, last in origin.requests) == len(image.blob)


_KILLED = """
import sys, time
from bootseer.native import _core
directory, key, map_path, blob, trace = sys.argv[1:]
cache = _core.Cache(directory, sync_interval_s=0.02)
file = _core.BlockFile(cache, key, _core.ChunkMap.load(map_path), _core.open_source(blob),
                       trace_path=trace, background_fill=False)
print("open", flush=True)
offset = 0
while True:
    file.pread(offset % file.size_bytes, 5000)
    offset += 7001
"""


def test_sigkill_at_any_moment_leaves_a_usable_cache_and_trace(tmp_path: Path, image: Image) -> None:
    (tmp_path / "blob").write_bytes(image.blob)
    (tmp_path / "map").write_bytes(image.map.serialize())
    trace = tmp_path / "trace"
    arguments = [
        str(tmp_path / "cache"),
        image.key,
        str(tmp_path / "map"),
        str(tmp_path / "blob"),
        str(trace),
    ]
    rng = random.Random(4)
    for _ in range(5):
        process = subprocess.Popen([sys.executable, "-c", _KILLED, *arguments], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        time.sleep(rng.random() * 0.15)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with open_file(tmp_path / "cache", image, str(tmp_path / "blob")) as file:
            assert file.pread(0, len(image.raw)) == image.raw
    loaded = _core.Trace.load(str(trace))
    assert loaded.dropped == 0
    times = [t_ns for _, _, _, t_ns in loaded.records()]
    assert times == sorted(times)


_LIMITED = """
import os, resource, signal, sys
from bootseer.native import _core
directory, key, map_path, blob, raw = sys.argv[1:]
want = open(raw, "rb").read()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
cache = _core.Cache(directory, sync_interval_s=60)
file = _core.BlockFile(cache, key, _core.ChunkMap.load(map_path), _core.open_source(blob),
                       background_fill=False)
limit = len(want) // 2
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
file.prefetch([(i, i) for i in range(_core.ChunkMap.load(map_path).chunk_count)])
for _ in range(3):
    for offset in range(0, len(want), 4096):
        assert file.pread(offset, 4096) == want[offset:offset + 4096], offset
statistics = file.statistics()
assert float(statistics["fallback_cache_write_failed"]) > 0
assert float(statistics["fallback_served_from_memory"]) > 0
assert statistics["errors"] == 0
assert not file.is_complete()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file.close()
"""


def test_a_disk_that_refuses_never_fails_a_read(tmp_path: Path, image: Image) -> None:
    """The file size limit stands in for a full disk: the same code path, EFBIG instead of ENOSPC."""
    paths = []
    for name, content in (("map", image.map.serialize()), ("blob", image.blob), ("raw", image.raw)):
        (tmp_path / name).write_bytes(content)
        paths.append(str(tmp_path / name))
    subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path / "cache"), image.key, *paths], check=True, timeout=60
    )
    # With room again, the rest is fetched and everything is cached.
    fill(tmp_path / "cache", image)
    assert (blob_dir(tmp_path / "cache", image) / "data").read_bytes() == image.raw


def test_cache_directory_misuse(tmp_path: Path, image: Image) -> None:
    cache = _core.Cache(str(tmp_path))
    source = tmp_path / "blob"
    source.write_bytes(image.blob)
    with pytest.raises(UsageError):
        _core.BlockFile(cache, "../../etc", image.map, _core.open_source(str(source)))
    cache.close()
    (tmp_path / "FORMAT").write_text("bootseer cache 99\n")
    with pytest.raises(UsageError, match="unknown format"):
        _core.Cache(str(tmp_path))
    with pytest.raises(OSError):
        _core.Cache("/proc/nothing/here")


def test_usage_counts_disk_blocks(tmp_path: Path, image: Image) -> None:
    cache = _core.Cache(str(tmp_path))
    assert cache.usage_bytes() == 0
    fill(tmp_path, image)
    assert cache.usage_bytes() >= len(image.raw) // 2
    cache.close()


# ---- trace ----


def test_the_trace_of_a_run_is_the_plan_of_the_next(tmp_path: Path, image: Image) -> None:
    path = tmp_path / "trace"
    order = [9, 2, 16, 5]
    with serve(image.blob) as origin:
        with open_file(tmp_path / "a", image, origin.url, trace_path=str(path)) as file:
            for chunk in order:
                file.pread(image.map.chunk(chunk)[0], 100)
                file.pread(image.map.chunk(chunk)[0], 100)
            file.mark_ready()
            file.pread(image.map.chunk(20)[0], 100)
        trace = _core.Trace.load(str(path))
        assert trace.is_finished
        assert [record[:2] for record in trace.records()] == [(image.map.chunk(c)[0], 100) for c in order]
        plan = trace.plan(image.map)
        assert [chunk for chunk, _ in plan] == order
        with open_file(tmp_path / "b", image, origin.url) as file:
            file.prefetch(plan)
            wait_until(
                lambda: file.statistics()["plan_done"] == 1 and file.statistics()["prefetched_chunks"] == 4
            )
            for chunk in order:
                file.pread(image.map.chunk(chunk)[0], 100)
            assert file.statistics()["misses"] == 0


def test_record_off_writes_nothing(tmp_path: Path, image: Image) -> None:
    with serve(image.blob) as origin:
        trace = tmp_path / "trace"
        with open_file(tmp_path, image, origin.url, trace_path=str(trace), record=False) as file:
            file.pread(0, 100)
        assert not trace.exists()


def test_an_unwritable_trace_is_a_counted_fallback(tmp_path: Path, image: Image) -> None:
    with (
        serve(image.blob) as origin,
        open_file(tmp_path, image, origin.url, trace_path="/proc/nothing/trace") as file,
    ):
        assert file.pread(0, 100) == image.raw[:100]
        assert file.statistics()["fallback_trace_unwritable"] == 1


def test_damaged_traces(tmp_path: Path, image: Image) -> None:
    path = tmp_path / "trace"
    with serve(image.blob) as origin, open_file(tmp_path, image, origin.url, trace_path=str(path)) as file:
        for chunk in range(image.map.chunk_count):
            file.pread(image.map.chunk(chunk)[0], 1)
    good = path.read_bytes()
    records = _core.Trace.parse(good).records()
    assert len(records) == image.map.chunk_count
    for cut in range(len(good)):
        if cut < 64:
            with pytest.raises(IntegrityError):
                _core.Trace.parse(good[:cut])
        else:
            assert _core.Trace.parse(good[:cut]).records() == records[: (cut - 64) // 32]
    damaged = bytearray(good)
    damaged[64 + 32 * 5 + 3] ^= 1
    trace = _core.Trace.parse(damaged)
    assert trace.records() == records[:5]
    assert trace.dropped == image.map.chunk_count - 5
    with pytest.raises(IntegrityError):
        _core.Trace.parse(b"BSRTRCE2" + good[8:])


def test_merge_keeps_the_earliest_use() -> None:
    from bootseer.native._core import Trace

    empty = struct.pack("<8sIIIIQQ20x", b"BSRTRCE1", 1, 64, 32, 0, 5, 1 << 20)
    assert len(empty) == 60
    with pytest.raises(IntegrityError):
        Trace.parse(empty + b"\0\0\0\0")
    assert Trace.merge([]).records() == []
