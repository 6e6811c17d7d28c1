"""``bootseer doctor``."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from tests._node import mounted
from tests.cli.conftest import Bootseer, FakeDaemon, finish, make_mount, make_status, start

from bootseer.cli import doctor_cmd


def test_this_machine(can_mount: None, fake: FakeDaemon, tmp_path: Path) -> None:
    """In a process of its own, since it takes a mount namespace."""
    fake.answer("GET status", 200, make_status(state_dir=str(tmp_path)))
    before = mounted()
    outcome = finish(start("--socket", fake.socket_path, "doctor", "--json"))
    found = {finding["check"]: finding for finding in outcome.json["findings"]}
    assert {finding["level"] for finding in found.values()} <= {"ok", "warn"}, found
    assert outcome.code == 0
    assert outcome.json["ok"] is True
    assert found["daemon"]["detail"] == "pid 7, 0 mounts"
    assert found["overlay"]["detail"] == "tried"
    assert found["runc"]["level"] == "ok" or found["crun"]["level"] == "ok"
    assert mounted() == before


def test_what_fails_decides_the_exit_code(
    bootseer: Bootseer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    outcome = bootseer("--socket", tmp_path / "nothing.sock", "doctor")
    rows = {line.split("  ")[0]: line for line in outcome.out.splitlines()}
    assert outcome.code == 1
    assert " fail " in rows["mounting"]
    assert " fail " in rows["daemon"]
    assert "start bootseerd" in rows["daemon"]
    assert "(not tried)" in rows["overlay"]


def test_a_daemon_that_is_not_well(
    bootseer: Bootseer, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    fake.answer("GET status", 200, make_status(mounts=[make_mount(state="failed")]))
    assert "failed: abc123" in bootseer("--socket", fake.socket_path, "doctor").out
    fake.answer("GET status", 200, make_status(fallbacks={"resend": 1}))
    assert "does without: resend" in bootseer("--socket", fake.socket_path, "doctor").out


@pytest.mark.parametrize(
    ("release", "version"),
    [
        ("6.18.44-fc", (6, 18)),
        ("5.10.0-30-amd64", (5, 10)),
        ("6.1-rc3", (6, 1)),
        ("6.12rc1", (6, 12)),
        ("six", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_kernel_version(release: str, version: tuple[int, int]) -> None:
    assert doctor_cmd.kernel_version(release) == version


def test_file_systems(tmp_path: Path) -> None:
    path = tmp_path / "filesystems"
    path.write_text("nodev\tproc\n\text4\nnodev\tfuse\n\n")
    assert doctor_cmd.file_systems(path) == {"proc", "ext4", "fuse"}


def test_kernel_option(tmp_path: Path) -> None:
    packed, plain, broken = tmp_path / "config.gz", tmp_path / "config", tmp_path / "broken.gz"
    packed.write_bytes(gzip.compress(b"CONFIG_A=y\nCONFIG_B=m\n# CONFIG_C is not set\nCONFIG_AB=n\n"))
    plain.write_text("CONFIG_C=y\n")
    broken.write_bytes(b"nonsense")
    assert doctor_cmd.kernel_option("CONFIG_A", (packed,)) is True
    assert doctor_cmd.kernel_option("CONFIG_B", (packed, plain)) is True
    assert doctor_cmd.kernel_option("CONFIG_C", (packed, plain)) is False
    assert doctor_cmd.kernel_option("CONFIG_C", (broken, plain)) is True
    assert doctor_cmd.kernel_option("CONFIG_A", (tmp_path / "nothing",)) is None
