"""Runtimes, overlays and what is cleared up; commands themselves are tested through ``bootseer image run``."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests._node import mounted

from bootseer import native
from bootseer.core.errors import ConfigError, IntegrityError, NotFoundError, UsageError
from bootseer.core.mountinfo import MountEntry, mounted_on
from bootseer.image import runtime
from bootseer.image.owner import owner, owner_is_gone
from bootseer.image.runtime import Probe

# Says what it was asked on "calls"; "create" does what the file named after the runtime says.
_FAKE_RUNTIME = """#!/bin/sh
here={here}
echo "$(basename $0) $3" >>$here/calls
[ "$3" != create ] || [ ! -e $here/$(basename $0)-fails ] || {{ echo first; echo no such luck >&2; exit 1; }}
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is all of PATH, with runtimes that pretend."""
    directory = tmp_path / "fakes"
    directory.mkdir()
    for name in ("runc", "crun"):
        (directory / name).write_text(_FAKE_RUNTIME.format(here=directory))
        (directory / name).chmod(0o755)
    (directory / "calls").touch()
    for tool in ("basename", "sh"):
        (directory / tool).symlink_to(f"/usr/bin/{tool}")
    monkeypatch.setenv("PATH", str(directory))
    return directory


def calls(fakes: Path) -> list[str]:
    """And begin anew."""
    found = (fakes / "calls").read_text().splitlines()
    (fakes / "calls").write_text("")
    return found


# -- which runtime -------------------------------------------------------------------------------------------------


def test_the_first_that_works_is_remembered(fakes: Path, tmp_path: Path) -> None:
    memory = tmp_path / "deep/memory.json"
    first = runtime.select("auto", memory)
    assert (first.name, dict(first.skipped), first.is_new) == ("crun", {}, True)
    assert calls(fakes) == ["crun create", "crun delete"]
    second = runtime.select("auto", memory)
    assert (second.name, second.is_new) == ("crun", False)
    assert calls(fakes) == []


def test_one_that_fails_is_skipped_and_says_why(fakes: Path, tmp_path: Path) -> None:
    memory = tmp_path / "memory.json"
    (fakes / "crun-fails").touch()
    for is_new in (True, False):
        found = runtime.select("auto", memory)
        assert (found.name, dict(found.skipped), found.is_new) == ("runc", {"crun": "no such luck"}, is_new)
    calls(fakes)
    (fakes / "runc-fails").touch()
    assert runtime.select("auto", memory).name == "runc"  # remembered
    runtime.forget(memory)
    found = runtime.select("auto", memory)
    assert found.name == "namespaces"
    assert set(found.skipped) == {"crun", "runc"}
    assert runtime.choose("auto", memory) == "namespaces"


def test_failures_are_forgotten_after_a_while(fakes: Path, tmp_path: Path) -> None:
    memory = tmp_path / "memory.json"
    (fakes / "crun-fails").touch()
    assert runtime.choose("auto", memory) == "runc"
    (fakes / "crun-fails").unlink()
    assert runtime.choose("auto", memory) == "runc"
    long_ago = time.time() - 7200
    os.utime(memory, (long_ago, long_ago))
    assert runtime.choose("auto", memory) == "crun"


def test_another_program_is_tried_anew(fakes: Path, tmp_path: Path) -> None:
    memory = tmp_path / "memory.json"
    assert runtime.choose("auto", memory) == "crun"
    (fakes / "crun-fails").touch()
    (fakes / "crun").write_text((fakes / "crun").read_text() + "# another version\n")
    assert runtime.choose("auto", memory) == "runc"


@pytest.mark.parametrize("content", [b"", b"[]", b"nonsense", b'{"x": 5}', b'{"x": {"wrong": 1}}', b"\xff"])
def test_a_damaged_memory(fakes: Path, tmp_path: Path, content: bytes) -> None:
    memory = tmp_path / "memory.json"
    memory.write_bytes(content)
    assert runtime.choose("auto", memory) == "crun"
    assert len(json.loads(memory.read_bytes())) == 1


def test_a_memory_that_cannot_be_written(fakes: Path) -> None:
    assert runtime.choose("auto", Path("/proc/nothing/memory.json")) == "crun"


def test_none_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert runtime.choose("auto", tmp_path / "memory.json") == "namespaces"
    with pytest.raises(ConfigError, match="runc is not installed"):
        runtime.choose("runc")
    assert runtime.choose("namespaces") == "namespaces"


def test_no_runtime() -> None:
    with pytest.raises(UsageError, match="'docker' is no runtime"):
        runtime.choose("docker")


def test_a_runtime_that_cannot_be_started(fakes: Path) -> None:
    (fakes / "runc").write_text("#!/no/such/interpreter\n")
    found = runtime.probe("runc")
    assert not found.works
    assert found.why


def test_the_probe_of_a_real_one_leaves_nothing(
    can_mount: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = mounted()
    found = {name: runtime.probe(name) for name in ("runc", "crun")}
    assert any(probe.works for probe in found.values()), found
    for probe in found.values():
        assert probe == Probe(True, probe.start_s) if probe.works else probe.why
    assert list(tmp_path.iterdir()) == []
    assert mounted() == before


# -- file systems --------------------------------------------------------------------------------------------------


def test_an_overlay(can_mount: None, tmp_path: Path) -> None:
    lower = tmp_path / "lower"
    lower.mkdir()
    (lower / "old").write_text("old")
    with runtime.temporary_work_dir(tmp_path) as work_dir:
        with runtime.overlay(lower, work_dir) as root:
            assert (root / "old").read_text() == "old"
            (root / "new").write_text("new")
            (root / "old").unlink()
        assert (work_dir / "upper/new").exists()
        assert root not in mounted()
    assert not work_dir.exists()
    assert (lower / "old").exists()


def test_an_overlay_that_is_still_used(can_mount: None, tmp_path: Path) -> None:
    """It leaves the name space all the same."""
    lower = tmp_path / "lower"
    lower.mkdir()
    (lower / "file").write_text("content")
    with runtime.temporary_work_dir(tmp_path) as work_dir:
        with runtime.overlay(lower, work_dir) as root:
            file = (root / "file").open()
        assert root not in mounted()
        with file:
            assert file.read() == "content"


def test_a_place_that_cannot_hold_an_overlay(can_mount: None, tmp_path: Path) -> None:
    """An overlay cannot be the upper directory of another one."""
    lower = tmp_path / "lower"
    lower.mkdir()
    with runtime.temporary_work_dir(tmp_path) as outer, runtime.overlay(lower, outer) as root:
        with (
            runtime.temporary_work_dir(tmp_path) as inner,
            pytest.raises(UsageError, match="cannot hold what a command writes"),
            runtime.overlay(lower, inner, keep_in=root / "place"),
        ):
            raise AssertionError("it was mounted")
        assert mounted().count(root) == 1


def test_images_that_cannot_be_mounted(can_mount: None, tmp_path: Path) -> None:
    target = tmp_path / "target"
    (tmp_path / "nonsense").write_bytes(b"x" * 100_000)
    with pytest.raises(IntegrityError), runtime.mounted_erofs(str(tmp_path / "nonsense"), target):
        raise AssertionError("it was mounted")
    with (
        pytest.raises((FileNotFoundError, NotFoundError)),
        runtime.mounted_erofs(str(tmp_path / "nothing"), target),
    ):
        raise AssertionError("it was mounted")
    assert target not in mounted()


def test_what_is_mounted_on(can_mount: None, tmp_path: Path) -> None:
    target = tmp_path / "with a space"
    target.mkdir()
    assert mounted_on(target) is None
    subprocess.run(["mount", "-t", "tmpfs", "a source", str(target)], check=True)
    try:
        assert mounted_on(target) == MountEntry(str(target), "tmpfs", "a source")
    finally:
        native.umount(str(target))


def test_private_mounts(can_mount: None, tmp_path: Path) -> None:
    """In a process of its own. What it mounts is gone with it, though it is killed."""
    script = f"""
import os, signal
from bootseer import native
from bootseer.image import runtime
runtime.private_mounts()
native.mount_bind("/usr", {str(tmp_path)!r})
assert os.path.isdir({str(tmp_path / "bin")!r})
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert process.returncode == -9, process.stderr
    assert tmp_path not in mounted()


# -- what killed runs leave ----------------------------------------------------------------------------------------


def test_only_what_is_abandoned_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "bootseer-run-left"
    (left / "upper").mkdir(parents=True)
    (left / "lock").touch()
    for name in ("bootseer-run-foreign", "something-else"):
        (tmp_path / name).mkdir()
    (tmp_path / "something-else/lock").touch()
    link = tmp_path / "bootseer-run-link"
    link.mkdir()
    (link / "lock").symlink_to(left / "lock")
    with runtime.temporary_work_dir(tmp_path) as used:
        runtime.remove_abandoned(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {
            *("bootseer-run-foreign", "something-else", "bootseer-run-link", used.name)
        }


def test_what_is_kept_is_nobodys(tmp_path: Path) -> None:
    with runtime.temporary_work_dir(tmp_path, keep=True) as work_dir:
        (work_dir / "upper").mkdir()
    runtime.remove_abandoned(tmp_path)
    assert work_dir.exists()


def test_a_lock_is_inherited_by_nobody_who_execs(tmp_path: Path) -> None:
    with runtime.temporary_work_dir(tmp_path) as work_dir:
        child = subprocess.Popen(["sleep", "60"])
        lock = os.open(work_dir / "lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(lock)
    left = tmp_path / "bootseer-run-left"
    left.mkdir()
    (left / "lock").touch()
    runtime.remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == []
    child.kill()
    child.wait()


def test_owners() -> None:
    mine = owner()
    assert not owner_is_gone(mine)
    pid, started, namespace = mine.split(":")
    assert owner_is_gone(f"{pid}:{int(started) + 1}:{namespace}")  # a later process of that number
    assert not owner_is_gone(f"{pid}:{int(started) + 1}:{int(namespace) + 1}")  # cannot be judged from here
    child = subprocess.Popen(["sleep", "60"])
    its = owner(child.pid)
    assert not owner_is_gone(its)
    child.kill()
    child.wait()
    assert owner_is_gone(its)


@pytest.mark.parametrize("text", ["", "x", "1", "1:", "a:b:c", "1:2", "²:1:1", ":::"])
def test_what_names_no_owner_is_not_gone(text: str) -> None:
    assert not owner_is_gone(text)
