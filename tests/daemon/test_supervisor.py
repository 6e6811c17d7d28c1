"""Mounts, workers that die, daemons that die, and what is left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests._node import Node, detach, kill, wait_until
from tests.conftest import StoredImage
from tests.daemon._readers import reading
from tests.native.origin import serve

from bootseer import native
from bootseer.core import errors, wire
from bootseer.image.convert import convert
from bootseer.image.resolve import resolve

STEADY_S = 0.3  # longer than a worker must live for its death not to count as one of a row


def kill_worker(node: Node, mount_id: str) -> None:
    """SIGKILL, then wait for the successor."""
    before = node.client.mounts()[0]
    assert before.id == mount_id
    os.kill(before.worker_pid, signal.SIGKILL)

    def replaced() -> bool:
        now = next(mount for mount in node.client.mounts() if mount.id == mount_id)
        return now.state == "ready" and now.worker_pid not in {0, before.worker_pid}

    wait_until(replaced, "a new worker serves")


def assert_nothing_left(node: Node) -> None:
    assert node.client.mounts() == []
    assert node.mounts() == []
    assert list((node.run_dir / "mounts").iterdir()) == []


# ---- mount and unmount ----


def test_every_byte_is_right(node: Node, image: StoredImage) -> None:
    mount = node.mount(image.layout, label="job 7")
    assert (mount.state, mount.restarts, mount.error, mount.label) == ("ready", 0, "", "job 7")
    assert mount.config["config"] == {"Cmd": ["/bin/true"]}
    assert Path(mount.image_path).stat().st_size == len(image.raw)
    assert Path(mount.image_path).read_bytes() == image.raw
    assert node.client.mounts() == [mount]
    # A reader is answered before its chunk is on disk, so this may lag.
    wait_until(
        lambda: node.client.statistics(mount.id)["file.ready_bytes"] == len(image.raw), "all is cached"
    )
    assert node.client.unmount(mount.id).state == "unmounted"
    assert_nothing_left(node)
    wait_until(lambda: mount.worker_pid not in node.workers(), "its worker ends")


def test_two_mounts_of_one_image_share_the_cache(node: Node, image: StoredImage) -> None:
    first, second = node.mount(image.layout), node.mount(image.layout)
    assert first.id != second.id
    assert Path(first.image_path).read_bytes() == image.raw
    fetched = node.client.statistics(first.id)["file.fetched_bytes"]
    assert Path(second.image_path).read_bytes() == image.raw
    again = node.client.statistics(second.id)["file.fetched_bytes"]
    assert isinstance(fetched, int) and isinstance(again, int)
    assert fetched > len(image.content.blob) // 2
    assert again == 0
    node.client.unmount(first.id)
    assert Path(second.image_path).read_bytes() == image.raw


def test_unmounting_a_busy_mount_is_one_line_and_changes_nothing(api: Node, image: StoredImage) -> None:
    mount = api.mount(image.layout)
    with Path(mount.image_path).open("rb") as file:
        with pytest.raises(errors.UsageError, match=f"^mount {mount.id} is busy$") as caught:
            api.client.unmount(mount.id)
        assert caught.value.hint is not None
        assert file.read() == image.raw
        assert api.client.mounts() == [mount]
    api.client.unmount(mount.id)
    assert_nothing_left(api)


def test_a_lazy_unmount_serves_who_has_the_file_open(node: Node, image: StoredImage) -> None:
    mount = node.mount(image.layout)
    with Path(mount.image_path).open("rb") as file:
        assert node.client.unmount(mount.id, lazy=True).state == "unmounted"
        assert node.client.mounts() == []
        assert node.mounts() == []
        with pytest.raises(errors.NotFoundError):
            node.client.unmount(mount.id)
        assert file.read() == image.raw
    wait_until(lambda: not list((node.run_dir / "mounts").iterdir()), "the mount is forgotten")
    wait_until(lambda: mount.worker_pid not in node.workers(), "its worker ends")


def test_a_lazy_unmount_outlives_the_daemon(node: Node, image: StoredImage) -> None:
    mount = node.mount(image.layout)
    with Path(mount.image_path).open("rb") as file:
        node.client.unmount(mount.id, lazy=True)
        node.end(signal.SIGKILL)
        node.start()
        assert node.client.mounts() == []
        assert file.read() == image.raw
    wait_until(lambda: not list((node.run_dir / "mounts").iterdir()), "the mount is forgotten")


def test_an_unmount_from_outside_is_noticed(api: Node, image: StoredImage) -> None:
    mount = api.mount(image.layout)
    assert Path(mount.image_path).read_bytes() == image.raw
    subprocess.run(["umount", mount.fuse_mountpoint], check=True)
    wait_until(lambda: not api.client.mounts(), "the daemon forgets the mount")
    assert_nothing_left(api)
    wait_until(lambda: mount.worker_pid not in api.workers(), "its worker ends")


@pytest.mark.parametrize("op", ["ready", "prefetch"])
def test_telling(api: Node, image: StoredImage, op: str) -> None:
    mount = api.mount(image.layout)
    assert api.client.tell(mount.id, op) == mount
    with pytest.raises(errors.NotFoundError, match="there is no mount nonsense"):
        api.client.tell("nonsense", op)
    api.client.unmount(mount.id)


def test_status_counts_fallbacks(node: Node, image: StoredImage) -> None:
    mount = node.mount(image.layout)
    assert Path(mount.image_path).read_bytes() == image.raw
    status = node.client.status()
    assert [each.id for each in status.mounts] == [mount.id]
    assert (status.run_dir, status.state_dir) == (str(node.run_dir), str(node.state_dir))
    reasons = node.client.statistics(mount.id)["session.fallbacks"]
    assert isinstance(reasons, dict)
    assert reasons["passthrough"] == "not wanted"  # EROFS cannot be mounted on a passthrough file
    assert status.fallbacks == {name: 1 for name, why in reasons.items() if why != "not wanted"}


# ---- mount points ----


def test_a_missing_mount_point_is_made_and_removed(api: Node, image: StoredImage) -> None:
    target = api.root / "a" / "b"
    mount = api.mount(image.layout, target)
    assert mount.image_path == str(target / "image.erofs")
    assert Path(mount.image_path).read_bytes() == image.raw
    api.client.unmount(mount.id)
    assert not target.exists()
    assert_nothing_left(api)


def test_a_mount_point_of_the_user_stays(api: Node, image: StoredImage) -> None:
    target = api.root / "own\tdir ü"
    target.mkdir()
    mount = api.mount(image.layout, target)
    assert Path(mount.image_path).read_bytes() == image.raw
    api.client.unmount(mount.id)
    assert target.is_dir()
    assert_nothing_left(api)


def test_a_mount_point_may_be_reached_by_a_link(api: Node, image: StoredImage) -> None:
    (api.root / "real").mkdir()
    (api.root / "link").symlink_to("real")
    mount = api.mount(image.layout, api.root / "link")
    assert mount.fuse_mountpoint == str(api.root / "real")
    api.client.unmount(mount.id)
    assert_nothing_left(api)


def test_a_mount_point_in_use_is_refused(node: Node, image: StoredImage) -> None:
    target = node.root / "target"
    mount = node.mount(image.layout, target)
    with pytest.raises(errors.UsageError, match=r"something is mounted on .*/target already"):
        node.mount(image.layout, target)
    assert node.client.mounts() == [mount]
    assert Path(mount.image_path).read_bytes() == image.raw


def test_of_two_mounts_on_one_point_one_wins(node: Node, image: StoredImage) -> None:
    target = node.root / "target"
    results: list[wire.Mount | errors.BootseerError] = []

    def try_it() -> None:
        try:
            results.append(node.mount(image.layout, target))
        except errors.UsageError as error:
            results.append(error)

    threads = [threading.Thread(target=try_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [result for result in results if isinstance(result, wire.Mount)]
    assert node.mounts() == [target]
    assert Path(winner.image_path).read_bytes() == image.raw


@pytest.mark.parametrize("what", ["relative", "not empty", "a file", "below a file", "a loop", "zero"])
def test_a_mount_point_that_cannot_be(api: Node, image: StoredImage, what: str) -> None:
    directory = api.root / what.replace(" ", "-")
    directory.mkdir()
    (directory / "file").write_text("precious")
    (directory / "loop").symlink_to("loop")
    target = {
        "relative": Path("mp"),
        "not empty": directory,
        "a file": directory / "file",
        "below a file": directory / "file" / "x",
        "a loop": directory / "loop",
        "zero": Path(f"{directory}/a\0b"),
    }[what]
    with pytest.raises(errors.UsageError) as caught:
        api.mount(image.layout, target)
    assert "\n" not in caught.value.message
    assert (directory / "file").read_text() == "precious"
    assert_nothing_left(api)


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, 1e9])
def test_a_deadline_that_cannot_be(api: Node, image: StoredImage, deadline_s: float) -> None:
    with pytest.raises(errors.UsageError, match="deadline"):
        api.mount(image.layout, deadline_s=deadline_s)
    assert_nothing_left(api)


# ---- workers that die ----


def test_readers_do_not_notice_that_workers_are_killed(
    node: Node, image: StoredImage, tmp_path: Path
) -> None:
    mount = node.mount(image.layout)
    with reading(tmp_path, mount.image_path, image.raw) as readers:
        for _ in range(20):
            kill_worker(node, mount.id)
            readers.wait_progress()
            time.sleep(STEADY_S)
    assert node.client.mounts()[0].restarts == 20
    node.client.unmount(mount.id)
    assert_nothing_left(node)


def test_a_worker_killed_while_it_starts(node: Node, image: StoredImage, tmp_path: Path) -> None:
    mount = node.mount(image.layout)
    with reading(tmp_path, mount.image_path, image.raw) as readers:
        time.sleep(STEADY_S)
        os.kill(mount.worker_pid, signal.SIGKILL)
        killed = {mount.worker_pid}

        def another() -> bool:
            # The successor, or the spare that is to become it.
            for pid in node.workers():
                if pid not in killed:
                    killed.add(pid)
                    kill(pid)
                    return True
            return False

        wait_until(another, "a second worker to kill")
        wait_until(
            lambda: (
                node.client.mounts()[0].state == "ready" and node.client.mounts()[0].worker_pid not in killed
            ),
            "a worker serves again",
        )
        readers.wait_progress()


def test_sigterm_of_a_worker_is_like_a_death(node: Node, image: StoredImage, tmp_path: Path) -> None:
    mount = node.mount(image.layout)
    with reading(tmp_path, mount.image_path, image.raw) as readers:
        os.kill(mount.worker_pid, signal.SIGTERM)
        wait_until(lambda: node.client.mounts()[0].restarts == 1, "the death is noticed")
        wait_until(lambda: node.client.mounts()[0].state == "ready", "a new worker serves")
        readers.wait_progress()


def test_workers_that_die_again_and_again(node: Node, image: StoredImage) -> None:
    mount = node.mount(image.layout)
    fd = os.open(mount.image_path, os.O_RDONLY)
    try:
        assert os.pread(fd, 4096, 0) == image.raw[:4096]
        (node.run_dir / "mounts" / mount.id / "chunkmap").write_bytes(b"damaged")  # no successor can start
        os.kill(mount.worker_pid, signal.SIGKILL)
        # It waits until the supervisor gives up.
        with pytest.raises(OSError, match=r"not connected|aborted|I/O"):
            os.pread(fd, 1 << 20, 1 << 20)
        wait_until(lambda: node.client.mounts()[0].state == "failed", "the mount is given up")
    finally:
        with contextlib.suppress(OSError):  # the flush of a close fails too
            os.close(fd)
    failed = node.client.mounts()[0]
    assert "chunk map" in failed.error
    assert "\n" not in failed.error
    assert node.mounts() == []
    with pytest.raises(errors.UsageError, match="has failed"):
        node.client.statistics(mount.id)
    node.client.unmount(mount.id)
    assert_nothing_left(node)
    assert Path(node.mount(image.layout).image_path).read_bytes() == image.raw  # the node is well


def test_workers_that_are_killed_again_and_again(node: Node, image: StoredImage) -> None:
    mount = node.mount(image.layout)

    def failed() -> bool:
        for pid in node.workers():
            kill(pid)
        return node.client.mounts()[0].state == "failed"

    wait_until(failed, "the mount is given up", 60)
    assert node.client.mounts()[0].restarts >= 1
    assert node.mounts() == []
    node.client.unmount(mount.id)
    assert_nothing_left(node)


def test_a_worker_that_cannot_start(node: Node, image: StoredImage) -> None:
    cache = node.state_dir / "cache"
    cache.rmdir()
    cache.write_text("in the way")
    target = node.root / "target"
    with pytest.raises(errors.BootseerError) as caught:
        node.mount(image.layout, target)
    assert str(cache) in caught.value.message
    assert not target.exists()
    assert_nothing_left(node)
    cache.unlink()
    cache.mkdir()
    assert Path(node.mount(image.layout, target).image_path).read_bytes() == image.raw


def test_the_workers_log_has_an_end_and_names_mounts(stopped_node: Node, image: StoredImage) -> None:
    stopped_node.run_dir.mkdir()
    log = stopped_node.run_dir / "worker.log"
    log.write_bytes(b"x" * ((4 << 20) + 1))
    stopped_node.start()
    assert log.with_name("worker.log.1").stat().st_size == (4 << 20) + 1
    mount = stopped_node.mount(image.layout, prefetch=True)
    (stopped_node.run_dir / "mounts" / mount.id / "plan.json").write_text("{")
    kill_worker(stopped_node, mount.id)
    assert f" WARNING {mount.id}[" in log.read_text()


def test_no_spare_worker_is_needed(node: Node, image: StoredImage) -> None:
    for pid in node.workers():
        kill(pid)
    wait_until(lambda: not node.client.status().spare_ready, "the spare is missed")
    assert Path(node.mount(image.layout).image_path).read_bytes() == image.raw


@pytest.mark.slow
def test_a_stopped_worker_can_be_unmounted_lazily(node: Node, image: StoredImage) -> None:
    mount = node.mount(image.layout)
    os.kill(mount.worker_pid, signal.SIGSTOP)
    assert node.client.status().mounts == [mount]
    with pytest.raises(errors.TimeoutExpiredError):
        node.client.unmount(mount.id)
    node.client.unmount(mount.id, lazy=True)
    wait_until(lambda: mount.worker_pid not in node.workers(), "its worker ends")
    wait_until(lambda: not list((node.run_dir / "mounts").iterdir()), "the mount is forgotten")
    assert_nothing_left(node)


def test_a_finished_recording_survives_the_death_of_its_worker(node: Node, image: StoredImage) -> None:
    mount = node.mount(image.layout, record=True)
    Path(mount.image_path).read_bytes()
    node.client.tell(mount.id, "ready")
    wait_until(lambda: native.Trace.load(mount.trace_path).is_finished, "the recording ends")
    recorded = native.Trace.load(mount.trace_path).records()
    kill_worker(node, mount.id)
    fd = os.open(mount.image_path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    assert Path(mount.image_path).read_bytes() == image.raw
    node.client.unmount(mount.id)
    trace = native.Trace.load(mount.trace_path)
    assert trace.is_finished
    assert trace.records() == recorded


# ---- a file system in the image ----


def test_a_file_system_survives_the_deaths_of_its_workers(node: Node, tmp_path: Path) -> None:
    rng = random.Random(9)
    source = tmp_path / "source"
    source.mkdir()
    files = {f"dir{n % 7}/file{n}": rng.randbytes(rng.randrange(200_000)) for n in range(60)}
    for name, content in files.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(content)
    convert(source, tmp_path / "layout", average_chunk_bytes=16 << 10)
    mount = node.mount(tmp_path / "layout", record=True, prefetch=True, background_fill=True)
    root = node.root / "root"
    root.mkdir()
    native.mount_erofs(mount.image_path, str(root))
    try:
        for name, content in files.items():
            if name.endswith("0"):
                kill_worker(node, mount.id)
                time.sleep(STEADY_S)
            assert (root / name).read_bytes() == content
        with pytest.raises(errors.UsageError, match="is busy"):
            node.client.unmount(mount.id)
        node.end(signal.SIGKILL)
        node.start()
        for name, content in files.items():
            assert (root / name).read_bytes() == content
    finally:
        native.umount(str(root))
    node.client.unmount(mount.id)
    assert_nothing_left(node)


# ---- daemons that die ----


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_daemon_may_go_and_come(node: Node, image: StoredImage, tmp_path: Path, number: int) -> None:
    mount = node.mount(image.layout)
    other = node.mount(image.layout, node.root / "made")
    with reading(tmp_path, mount.image_path, image.raw) as readers:
        assert node.end(number) == (0 if number == signal.SIGTERM else -number)
        assert node.mounts() == [Path(mount.fuse_mountpoint), Path(other.fuse_mountpoint)]
        readers.wait_progress()
        node.start()
        assert node.client.mounts() == [mount, other]
        readers.wait_progress()
        kill_worker(node, mount.id)
        readers.wait_progress()
    node.client.unmount(mount.id)
    node.client.unmount(other.id)
    assert not (node.root / "made").exists()
    assert_nothing_left(node)


def test_a_daemon_ends_while_it_waits_for_a_registry(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        outcomes: list[errors.BootseerError] = []

        def mount() -> None:
            with pytest.raises(errors.BootseerError) as caught:
                node.mount(f"http://127.0.0.1:{silent.getsockname()[1]}/layout")
            outcomes.append(caught.value)

        thread = threading.Thread(target=mount)
        thread.start()
        connection, _ = silent.accept()
        with connection:
            began = time.monotonic()
            assert node.end(signal.SIGTERM) == 0
            assert time.monotonic() - began < 15  # and not the 30 s that a registry may take
        thread.join(20)
        assert [type(outcome) for outcome in outcomes] == [errors.DaemonUnreachableError]
    node.start()
    assert_nothing_left(node)


def test_spares_end_with_their_daemon(node: Node) -> None:
    wait_until(lambda: len(node.workers()) == 1, "there is a spare")
    node.end(signal.SIGKILL)
    wait_until(lambda: not node.workers(), "the spare is gone")


def test_a_mount_whose_worker_died_while_no_daemon_ran(node: Node, image: StoredImage) -> None:
    target = node.root / "target"
    mount = node.mount(image.layout, target)
    node.end(signal.SIGKILL)
    os.kill(mount.worker_pid, signal.SIGKILL)
    wait_until(lambda: mount.worker_pid not in node.workers(), "the worker is dead")
    node.start()
    assert f"mount {mount.id} was lost" in node.log()
    assert_nothing_left(node)
    assert not target.exists()


@pytest.mark.parametrize("end", ["goes on", "dies", "is unmounted"])
def test_a_silent_worker_is_not_taken_for_a_dead_one(node: Node, image: StoredImage, end: str) -> None:
    target = node.root / "target"
    mount = node.mount(image.layout, target)
    node.end(signal.SIGKILL)
    os.kill(mount.worker_pid, signal.SIGSTOP)
    node.start()
    (silent,) = node.client.mounts()
    assert (silent.state, silent.worker_pid) == ("restarting", mount.worker_pid)
    assert silent.error == "its worker does not answer"
    assert node.mounts() == [target]
    if end == "goes on":
        os.kill(mount.worker_pid, signal.SIGCONT)
        wait_until(lambda: node.client.mounts() == [mount], "the mount is adopted")
        assert Path(mount.image_path).read_bytes() == image.raw
        kill_worker(node, mount.id)
        assert Path(mount.image_path).read_bytes() == image.raw
    elif end == "dies":
        kill(mount.worker_pid)
        wait_until(lambda: not node.client.mounts(), "the mount is cleared")
        assert_nothing_left(node)
    else:
        node.client.unmount(mount.id, lazy=True)
        wait_until(lambda: mount.worker_pid not in node.workers(), "its worker ends")
        assert_nothing_left(node)


def test_what_a_mount_knows_is_for_its_owner_only(node: Node, image: StoredImage) -> None:
    mount = node.mount(image.layout)  # the headers of an origin may be secret
    kill_worker(node, mount.id)
    assert (node.run_dir / "mounts" / mount.id / "spec.json").stat().st_mode & 0o777 == 0o600


def test_generated_content_of_a_worker_ends_with_it(node: Node, image: StoredImage) -> None:
    mount = node.mount(image.layout)
    path = Path(mount.fuse_mountpoint) / ".bootseer" / "stats.json"
    old = os.open(path, os.O_RDONLY)
    assert os.pread(old, 1, 0) == b"{"
    kill_worker(node, mount.id)
    new = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(OSError) as caught:  # not the content of the other
            os.pread(old, 1, 0)
        assert caught.value.errno == errno.ESTALE
    finally:
        os.close(old)
    try:
        time.sleep(0.05)  # a release is sent and not waited for
        assert os.pread(new, 1, 0) == b"{"
    finally:
        os.close(new)


def test_a_successor_goes_on_with_the_prefetch(node: Node, image: StoredImage) -> None:
    mount = node.mount(image.layout, record=True)
    assert Path(mount.image_path).read_bytes() == image.raw
    node.client.tell(mount.id, "ready")
    node.client.unmount(mount.id)
    digest = resolve(str(image.layout), state_dir=node.state_dir).manifest_digest
    for cached in (node.state_dir / "cache").rglob("*"):
        if cached.is_file():
            cached.unlink()
    with serve(image.content.blob, "stall") as origin:
        mount = node.mount(f"http://127.0.0.1:{origin.port}/layout@{digest}", prefetch=True)
        wait_until(lambda: origin.requests, "the prefetch has begun")
        os.kill(mount.worker_pid, signal.SIGKILL)
        origin.default = "ok"
        wait_until(lambda: node.client.mounts()[0].restarts == 1, "the death is noticed")
        wait_until(
            lambda: node.client.statistics(mount.id)["file.ready_bytes"] == len(image.raw),
            "all of the plan is fetched, and nobody reads",
        )


@pytest.mark.parametrize("plan", ["", "{", "5", "[5]", '[["a", 1]]', "[[1, 2, 3]]", "[[123456789, 0]]"])
def test_a_damaged_plan_costs_no_mount(node: Node, image: StoredImage, plan: str) -> None:
    mount = node.mount(image.layout, prefetch=True)
    (node.run_dir / "mounts" / mount.id / "plan.json").write_text(plan)
    kill_worker(node, mount.id)
    assert Path(mount.image_path).read_bytes() == image.raw


def test_only_what_is_ours_is_cleaned_up(node: Node, image: StoredImage) -> None:
    target = node.root / "target"
    mount = node.mount(image.layout, target)
    node.end(signal.SIGKILL)
    os.kill(mount.worker_pid, signal.SIGKILL)
    detach(target)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(target)], check=True)
    (target / "file").write_text("precious")
    node.start()
    assert node.client.mounts() == []
    assert (target / "file").read_text() == "precious"


def test_garbage_in_the_run_directory(node: Node, image: StoredImage) -> None:
    mount = node.mount(image.layout)
    node.end(signal.SIGKILL)
    copy = (node.run_dir / "mounts" / mount.id / "spec.json").read_bytes()
    for name, content in {"empty": None, "broken": b"{", "other": b'{"a": 1}', "copy": copy}.items():
        directory = node.run_dir / "mounts" / name
        directory.mkdir()
        if content is not None:
            (directory / "spec.json").write_bytes(content)
    (node.run_dir / "mounts" / "file").write_bytes(b"")
    node.start()
    assert node.client.mounts() == [mount]
    assert Path(mount.image_path).read_bytes() == image.raw


def run_daemon(node: Node, *options: str) -> tuple[int, str]:
    result = subprocess.run(node.command(*options), capture_output=True, text=True, timeout=30, check=False)
    assert result.stdout == ""
    return result.returncode, result.stderr


def test_a_second_daemon_is_refused(node: Node, image: StoredImage) -> None:
    status, message = run_daemon(node)
    assert status == 78
    assert message.startswith("bootseerd: another bootseerd runs on ")
    assert message.count("\n") == 1
    status, message = run_daemon(node, "--run-dir", str(node.root / "other"))
    assert status == 78
    assert message.startswith("bootseerd: another bootseerd answers on ")
    assert message.count("\n") == 1
    assert Path(node.mount(image.layout).image_path).read_bytes() == image.raw


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--state-dir", "file/state"),
        ("--state-dir", "file"),
        ("--run-dir", "file"),
        ("--run-dir", "x" * 100),
        ("--socket", "file"),
        ("--socket", "x" * 100),
        ("--socket", "file/d.sock"),
    ],
)
def test_a_place_that_cannot_be(stopped_node: Node, option: str, value: str) -> None:
    (stopped_node.root / "file").write_text("precious")
    status, message = run_daemon(stopped_node, option, str(stopped_node.root / value))
    assert status == 78
    assert message.startswith("bootseerd: ")
    assert message.count("\n") == 1, message
    assert (stopped_node.root / "file").read_text() == "precious"


def answers(node: Node) -> bool:
    try:
        return node.client.status().pid > 0
    except errors.DaemonUnreachableError:
        return False


def test_a_configuration_file(stopped_node: Node, image: StoredImage) -> None:
    file = stopped_node.root / "bootseer.toml"
    file.write_text('sokcet = "/a"\nlog_level = "LOUD"\n')
    status, message = run_daemon(stopped_node, "--config", str(file))
    assert status == 78
    assert "'sokcet'" in message and "LOUD" in message
    assert message.count("\n") == 1, message
    assert run_daemon(stopped_node, "--config", f"{file}.missing")[0] == 78
    other = stopped_node.root / "elsewhere"
    file.write_text(f'state_dir = "{other}"\nsocket = "/nowhere/at/all"\n')
    command = [sys.executable, "-m", "bootseer.daemon.main", "--config", str(file)]
    command += ["--socket", str(stopped_node.socket_path)]  # a flag wins
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as daemon:
        try:
            wait_until(lambda: answers(stopped_node), "the daemon answers")
            status_record = stopped_node.client.status()
            assert (status_record.pid, status_record.state_dir) == (daemon.pid, str(other))
            assert status_record.run_dir == str(stopped_node.run_dir)
        finally:
            daemon.terminate()
    assert daemon.returncode == 0
