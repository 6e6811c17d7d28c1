"""What holds for every verb: exit codes, one line of error, streams, and how little is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Bootseer, FakeDaemon, command, finish, make_status, start

from bootseer.core import errors, wire


def test_version(bootseer: Bootseer) -> None:
    outcome = bootseer("--version")
    assert outcome.code == 0
    assert outcome.out.startswith("bootseer ")


@pytest.mark.parametrize("path", [(), ("status",), ("doctor",), ("image",), ("image", "run")])
def test_help_lists_the_exit_codes(bootseer: Bootseer, path: tuple[str, ...]) -> None:
    outcome = bootseer(*path, "--help")
    assert outcome.code == 0
    assert "69 backend unavailable" in " ".join(outcome.out.split())


@pytest.mark.parametrize("path", [(), ("image",)])
def test_no_verb_is_a_usage_error(bootseer: Bootseer, path: tuple[str, ...]) -> None:
    outcome = bootseer(*path)
    assert outcome.code == 2
    assert "Usage:" in outcome.out + outcome.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("status", "--nonsense"),
        ("status", "surplus"),
        ("image", "nonsense"),
        ("image", "run"),
        ("image", "convert", "one"),
        ("image", "convert", "a", "b", "--level", "many"),
        ("image", "convert", "a", "b", "--level", "99"),
        ("image", "trace", "x", "--top", "-1"),
    ],
)
def test_wrong_arguments(bootseer: Bootseer, arguments: tuple[str, ...]) -> None:
    outcome = bootseer(*arguments)
    assert outcome.code == 2
    assert outcome.one_line()
    assert outcome.out == ""


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.UsageError, 2),
        (errors.NotFoundError, 4),
        (errors.IntegrityError, 5),
        (errors.TimeoutExpiredError, 6),
        (errors.BackendUnavailableError, 69),
        (errors.PermissionDeniedError, 77),
        (errors.ConfigError, 78),
        (errors.InternalError, 1),
    ],
)
def test_an_error_of_the_daemon(
    bootseer: Bootseer, fake: FakeDaemon, kind: type[errors.BootseerError], code: int
) -> None:
    fake.answer("GET status", 400, wire.ErrorBody.of(kind("two\nlines", hint="do this")))
    outcome = bootseer("--socket", fake.socket_path, "status")
    assert outcome.code == code
    assert outcome.one_line() == "two lines (do this)"
    assert outcome.out == ""


def test_no_daemon(bootseer: Bootseer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOTSEER_SOCKET", str(tmp_path / "nothing.sock"))
    for verb in (["status"], ["image", "ls"], ["image", "umount", "x"], ["image", "mount", "x", tmp_path]):
        outcome = bootseer(*verb)
        assert outcome.code == 3
        assert "start bootseerd" in outcome.one_line()


def test_a_reader_that_leaves(fake: FakeDaemon) -> None:
    fake.answer("GET status", 200, make_status())
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        command("--socket", fake.socket_path, "status"), stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (process.returncode, process.stderr) == (141, b"")


def test_a_full_disk(fake: FakeDaemon) -> None:
    fake.answer("GET status", 200, make_status())
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(
            command("--socket", fake.socket_path, "status"), stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert (process.returncode, process.stderr) == (1, b"bootseer: No space left on device\n")


def test_closed_streams(fake: FakeDaemon) -> None:
    fake.answer("GET status", 200, make_status())
    words = " ".join(command("--socket", fake.socket_path, "status"))
    assert subprocess.run(["sh", "-c", f"exec {words} >&- 2>&-"], check=False).returncode == 0


def test_names_that_are_no_utf8(fake: FakeDaemon) -> None:
    outcome = finish(start("--socket", os.fsdecode(b"/tmp/\xff.sock"), "status"))
    assert outcome.code == 3
    assert "\\udcff" in outcome.one_line()


def test_a_verb_of_the_socket_imports_little(fake: FakeDaemon) -> None:
    """Start-up time is imports; these are the expensive ones."""
    fake.answer("GET status", 200, make_status())
    script = f"""
import sys
from bootseer.cli import app
sys.argv[1:] = ["--socket", {str(fake.socket_path)!r}, "status"]
assert app._run() == 0
heavy = {{"rich", "trio", "pyfuse3", "asyncio", "http.client", "ssl", "pydantic", "bootseer.native", "bootseer.image"}}
print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stderr == "[]\n"
