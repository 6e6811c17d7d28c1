"""``bootseer image run`` with a real daemon, a real image and each runtime that works here."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests._node import Node, wait_until
from tests.cli.conftest import FakeDaemon, Outcome, command, finish, make_mount, start

from bootseer.core import wire
from bootseer.image import layout, runtime

QUIET = ("--no-record", "--no-background-fill", "--no-prefetch")


@pytest.fixture(params=["runc", "namespaces"])
def kind(request: pytest.FixtureRequest) -> str:
    """A runtime that works here."""
    name: str = request.param
    if name == "runc" and not runtime.probe("runc").works:
        pytest.skip("runc does not work here")
    return name


def run(image: object, *words: object, kind: str = "namespaces", options: tuple[object, ...] = ()) -> Outcome:
    """Run a command to its end."""
    return finish(start("image", "run", "--runtime", kind, *QUIET, *options, image, "--", *words))


def test_exit_codes(daemon: Node, shell_image: Path, kind: str) -> None:
    for script, code in (("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $BASHPID", 143)):
        program = "bash" if "BASHPID" in script else "sh"
        # A first process of a pid namespace cannot kill itself, so a child does.
        words = [program, "-c", f"{program} -c '{script}'; exit $?"]
        assert run(shell_image, *words, kind=kind).code == code, script


def test_what_cannot_start(daemon: Node, shell_image: Path, kind: str) -> None:
    for word, code, message in (
        ("no-such-program", 127, "no-such-program is not in the image"),
        ("/bin/nothing", 127, "/bin/nothing is not in the image"),
        ("/work/orphan", 127, "/work/orphan: its interpreter /no/such/interpreter is not in the image"),
        ("/work/plain", 126, "/work/plain is no executable file"),
        ("/etc", 126, "/etc is no executable file"),
    ):
        outcome = run(shell_image, word, kind=kind)
        assert (outcome.code, outcome.one_line()) == (code, message)


def test_what_the_command_sees(daemon: Node, shell_image: Path, kind: str) -> None:
    script = 'pwd; echo $A $HOME $PATH; id -u; id -g; hostname; ls /dev/null /proc/self/cmdline; "$0" x'
    outcome = run(
        shell_image,
        *("sh", "-c", script, "/work/link"),
        kind=kind,
        options=("-e", "A=b=c", "--workdir", "/new/place", "-u", "bob", "--hostname", "there"),
    )
    assert outcome == Outcome(
        0,
        "/new/place\nb=c /home/bob /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"
        "1234\n1235\nthere\n/dev/null\n/proc/self/cmdline\nscript x\n",
        "",
    )


def test_defaults(daemon: Node, shell_image: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSED_ON", "value")
    monkeypatch.setenv("KEPT_BACK", "value")
    outcome = run(shell_image, "sh", "-c", "pwd; hostname; env", kind=kind, options=("-e", "PASSED_ON"))
    lines = outcome.out.splitlines()
    assert lines[:2] == ["/", os.uname().nodename]
    assert "PASSED_ON=value" in lines
    assert "HOME=/root" in lines
    assert "KEPT_BACK" not in outcome.out


def test_volumes(daemon: Node, shell_image: Path, kind: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/file").write_text("from outside\n")
    (tmp_path / "single").write_text("single\n")
    script = (
        "cat /data/file /deep/er/file; echo back >/data/back; (echo no >/ro/x) 2>/dev/null || echo read-only"
    )
    volumes = [f"{tmp_path}/in:/data", f"{tmp_path}/single:/deep/er/file", f"{tmp_path}/in:/ro:ro"]
    options = [word for volume in volumes for word in ("-v", volume)]
    outcome = run(shell_image, "sh", "-c", script, kind=kind, options=tuple(options))
    assert outcome == Outcome(0, "from outside\nsingle\nread-only\n", "")
    assert (tmp_path / "in/back").read_text() == "back\n"


def test_the_host_stays_out_of_it(daemon: Node, shell_image: Path, kind: str) -> None:
    script = "echo x >/etc/new && echo y >>/etc/passwd && cat /etc/new; cat /proc/self/mountinfo"
    outcome = run(shell_image, "sh", "-c", script, kind=kind)
    assert outcome.code == 0
    assert outcome.out.startswith("x\n")
    assert str(daemon.root) not in re.sub(r"(lower|upper|work)dir=\S+", "", outcome.out)
    assert daemon.mounts() == []
    assert run(shell_image, "cat", "/etc/new", kind=kind).code == 1


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGTERM, "TERM"), (signal.SIGINT, "INT"), (signal.SIGUSR1, "USR1")]
)
def test_signals_are_passed_on_once(
    daemon: Node, shell_image: Path, kind: str, tmp_path: Path, number: int, name: str
) -> None:
    script = (
        f"n=0; trap 'n=$((n+1))' {name}; echo >/out/ready; "
        "while [ ! -e /out/end ]; do sleep 0.02; done; exit $((40+n))"
    )
    process = start(
        *("image", "run", "--runtime", kind, *QUIET, "-v", f"{tmp_path}:/out", shell_image),
        *("--", "bash", "-c", script),
    )
    wait_until((tmp_path / "ready").exists, "the command runs")
    process.send_signal(number)
    time.sleep(0.1)  # a second delivery would need a moment; its absence is what the exit code shows
    (tmp_path / "end").touch()
    assert finish(process).code == 41


def test_who_ignores_requests_to_end_is_killed(
    daemon: Node, shell_image: Path, kind: str, tmp_path: Path
) -> None:
    process = start(
        *("image", "run", "--runtime", kind, *QUIET, "-v", f"{tmp_path}:/out", shell_image),
        *("--", "bash", "-c", "trap '' TERM INT; echo >/out/ready; while :; do sleep 0.1; done"),
    )
    wait_until((tmp_path / "ready").exists, "the command runs")

    def insist() -> bool:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        return process.poll() is not None

    wait_until(insist, "the command is killed")
    assert finish(process).code == 137


def test_ctrl_c_of_a_terminal_arrives_once(
    daemon: Node, shell_image: Path, kind: str, tmp_path: Path
) -> None:
    """The terminal signals its whole foreground group; what of it is in the container must not get a second one."""
    script = "n=0; trap 'n=$((n+1))' INT; echo >/out/ready; until [ -e /out/end ]; do sleep 0.02; done; exit $((40+n))"
    words = command("image", "run", "--runtime", kind, *QUIET, "-v", f"{tmp_path}:/out", shell_image)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [*words, "--", "bash", "-c", script])
    try:
        wait_until((tmp_path / "ready").exists, "the command runs")
        os.write(terminal, b"\x03")
        time.sleep(0.2)
        (tmp_path / "end").touch()
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 41


def test_a_terminal_of_its_own(daemon: Node, shell_image: Path) -> None:
    if not runtime.probe("runc").works:
        pytest.skip("runc does not work here")
    words = command("image", "run", "--runtime", "runc", *QUIET, "-t", shell_image)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [*words, "--", "sh", "-c", "test -t 0 && test -t 1 && echo is-a-tty $TERM"])
    output = b""
    with contextlib.suppress(OSError):  # EIO: the end of a terminal
        while data := os.read(terminal, 4096):
            output += data
    os.waitpid(pid, 0)
    os.close(terminal)
    assert b"is-a-tty" in output


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("-e", "=x"), 2, "is not NAME=VALUE"),
        (("-e", "NOT_SET_HERE"), 2, "NOT_SET_HERE is not set here"),
        (("-v", "nonsense"), 2, "is no volume"),
        (("-v", "/no/such/place:/x"), 2, "does not exist"),
        (("-v", "/tmp:/x/../../y"), 2, "cannot be mounted on"),
        (("-v", "/tmp:/"), 2, "cannot be mounted on"),
        (("-v", "/tmp:/x:rx"), 2, "is no volume"),
        (("--runtime", "docker"), 2, "is no runtime"),
        (("--user", "nobody-here"), 2, "the image has no user nobody-here"),
        (("--user", "broken"), 2, "is no id"),
        (("--user", "bob:nogroup"), 2, "the image has no group nogroup"),
        (("--workdir", "/etc/passwd/x"), 2, "cannot be a directory"),
        (("--upper", "/proc/x"), 4, "/proc/x"),
        (("--upper", "/tmp/x", "--keep"), 2, "leave --keep out"),
        (("--tty",), 2, "needs a terminal"),
    ],
)
def test_mistakes(daemon: Node, shell_image: Path, options: tuple[str, ...], code: int, message: str) -> None:
    outcome = run(shell_image, "true", options=options)
    assert message in outcome.one_line()
    assert outcome.code == code


def test_images_that_are_none(daemon: Node, shell_image: Path, tmp_path: Path) -> None:
    assert run(tmp_path / "nothing", "true").code == 4
    assert run(f"{shell_image}:other", "true").code == 4
    (tmp_path / "index.json").write_text("{}")
    outcome = run(tmp_path, "true")
    assert outcome.code == 5
    assert outcome.one_line()


def test_an_image_that_is_no_file_system(daemon: Node, image: Any) -> None:
    """Its chunks are right, but they are no EROFS."""
    outcome = run(image.layout, "true")
    assert outcome.code == 5
    assert "is no EROFS image" in outcome.one_line()


def test_an_origin_with_wrong_chunks(daemon: Node, shell_image: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(shell_image), str(copy)], check=True)
    store = layout.DirectoryStore(copy)
    _, manifest = layout.read_manifest(store, layout.manifest_descriptor(store, "latest", None))
    blob = next(x for x in manifest["layers"] if x["mediaType"] == layout.CHUNKS_TYPE)
    path = copy / layout.blob_path(blob["digest"])
    path.write_bytes(bytes(path.stat().st_size))
    other = Node()  # with an empty cache
    try:
        other.start()
        words = ("image", "run", "--runtime", "namespaces", *QUIET, copy, "--", "sh")
        outcome = finish(start("--socket", other.socket_path, *words))
        assert outcome.code == 5
        assert "cannot be mounted: Input/output error (bad_frame" in outcome.one_line()
        assert other.client.mounts() == []
    finally:
        other.cleanup()


def test_the_report(daemon: Node, shell_image: Path, kind: str) -> None:
    outcome = run(shell_image, "sh", "-c", "echo out; echo err >&2; exit 3", kind=kind, options=("--json",))
    assert (outcome.code, outcome.out) == (3, "out\n")
    said, document = outcome.err.splitlines()
    report = json.loads(document)
    assert said == "err"
    assert report["runtime"] == kind
    assert report["exit_code"] == 3
    assert report["digest"].startswith("sha256:")
    assert 0 < report["mounted_s"] < report["started_s"] < report["ended_s"]


def test_auto_remembers_what_works(daemon: Node, shell_image: Path) -> None:
    memory = daemon.socket_path.parent / "runtimes.json"
    memory.unlink(missing_ok=True)
    first = run(shell_image, "true", kind="auto", options=("--json",))
    second = run(shell_image, "true", kind="auto", options=("--json",))
    assert (first.code, second.code) == (0, 0)
    *said, document = first.err.splitlines()
    report = json.loads(document)
    skipped = report["skipped_runtimes"]
    assert [line.split()[1] for line in said] == list(skipped)  # one line for each, the first time only
    assert json.loads(second.err)["skipped_runtimes"] == skipped
    assert json.loads(second.err)["runtime"] == report["runtime"]
    assert len(json.loads(memory.read_text())) == len(skipped) + (report["runtime"] != "namespaces")


def test_what_is_written_can_be_kept(daemon: Node, shell_image: Path, tmp_path: Path) -> None:
    upper = tmp_path / "upper dir"
    script = "cat /etc/new 2>/dev/null; echo again >>/etc/new"
    assert run(shell_image, "sh", "-c", script, options=("--upper", upper)).out == ""
    assert run(shell_image, "sh", "-c", script, options=("--upper", upper)).out == "again\n"
    assert (upper / "upper/etc/new").read_text() == "again\nagain\n"


def test_keep(daemon: Node, shell_image: Path) -> None:
    outcome = run(shell_image, "sh", "-c", "echo kept >/file", options=("--keep",))
    assert outcome.code == 0
    upper = Path(outcome.one_line().removeprefix("what the command wrote is in "))
    assert (upper / "file").read_text() == "kept\n"
    subprocess.run(["rm", "-r", str(upper.parent)], check=True)


def test_one_command_at_a_time_writes_to_an_upper(daemon: Node, shell_image: Path, tmp_path: Path) -> None:
    upper, out = tmp_path / "upper", tmp_path / "out"
    out.mkdir()
    first = start(
        *("image", "run", *QUIET, "--upper", upper, "-v", f"{out}:/out", shell_image),
        *("--", "sh", "-c", "echo >/out/ready; until [ -e /out/end ]; do sleep 0.02; done"),
    )
    wait_until((out / "ready").exists, "the first runs")
    outcome = run(shell_image, "true", options=("--upper", upper))
    assert (outcome.code, outcome.one_line()) == (2, f"another command runs on {upper}")
    (out / "end").touch()
    assert finish(first).code == 0


def test_prefetch_then_start(daemon: Node, shell_image: Path) -> None:
    assert finish(start("image", "run", shell_image, "--", "sh", "-c", "ls / >/dev/null")).code == 0
    outcome = finish(start("image", "run", "--wait", "20", shell_image, "--", "ls", "/work"))
    assert outcome == Outcome(0, "link\norphan\nplain\nscript\n", "")


def kill_outright(process: subprocess.Popen[str]) -> None:
    """Without waiting for the ends of its pipes: a container may live on and hold them."""
    process.kill()
    process.wait()
    for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        pipe.close()


def test_killed_outright(daemon: Node, shell_image: Path, tmp_path: Path) -> None:
    """The next run clears up what is left of it."""
    out = tmp_path / "out"
    out.mkdir()
    process = start(
        *("image", "run", "--runtime", "namespaces", *QUIET, "-v", f"{out}:/out", shell_image),
        *("--", "sh", "-c", "echo >/out/ready; sleep 1000"),
    )
    wait_until((out / "ready").exists, "the command runs")
    kill_outright(process)
    assert len(daemon.client.mounts()) == 1
    assert run(shell_image, "true").code == 0
    wait_until(lambda: not daemon.client.mounts(), "the mount is cleared")


def test_a_container_that_outlives_its_run_keeps_its_files(
    daemon: Node, shell_image: Path, tmp_path: Path
) -> None:
    if not runtime.probe("runc").works:
        pytest.skip("runc does not work here")
    out = tmp_path / "out"
    out.mkdir()
    script = (
        "echo >/out/ready; until [ -e /out/end ]; do sleep 0.02; done; "
        "cat /work/plain >/out/read; echo x >/new && echo >/out/done"
    )
    process = start(
        *("image", "run", "--runtime", "runc", *QUIET, "-v", f"{out}:/out", shell_image),
        *("--", "sh", "-c", script),
    )
    wait_until((out / "ready").exists, "the command runs")
    kill_outright(process)
    assert run(shell_image, "true").code == 0
    (out / "end").touch()
    wait_until((out / "done").exists, "the container has gone on")
    assert (out / "read").read_text() == "no program\n"

    def is_cleared() -> bool:
        assert run(shell_image, "true").code == 0
        return not list((daemon.root / "tmp").iterdir())

    wait_until(is_cleared, "its files are gone")


# -- before the command has started --------------------------------------------------------------------------------


@pytest.fixture
def slow_mount(fake: FakeDaemon) -> Iterator[threading.Event]:
    """POST answers when the event is set; what is undone is recorded."""
    release = threading.Event()
    body = wire.encode(make_mount(id="late"))
    answer = f"HTTP/1.1 201 X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    def wait_for_release(connection: socket.socket) -> None:
        release.wait(30)
        with contextlib.suppress(OSError):
            connection.sendall(answer)

    fake.answers["POST mounts"] = wait_for_release
    fake.answer("DELETE mounts/late?lazy=1", 200, make_mount(id="late"))
    fake.answer("GET mounts", 200, [])
    yield release
    release.set()


def test_interrupted_while_the_daemon_mounts(
    can_mount: None, fake: FakeDaemon, slow_mount: threading.Event
) -> None:
    process = start("--socket", fake.socket_path, "image", "run", "/x", "--", "true")
    wait_until(lambda: fake.requests, "the mount is asked for")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert process.stderr.readline() == "bootseer: waiting for bootseerd, to undo the mount\n"
    slow_mount.set()
    assert finish(process).code == 130
    assert ("DELETE mounts/late?lazy=1", b"") in fake.requests


def test_interrupted_twice(can_mount: None, fake: FakeDaemon, slow_mount: threading.Event) -> None:
    process = start("--socket", fake.socket_path, "image", "run", "/x", "--", "true")
    wait_until(lambda: fake.requests, "the mount is asked for")
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert "waiting for bootseerd" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert "is left to the next" in process.stderr.readline()
    slow_mount.set()
    assert finish(process).code == 143


def test_a_mount_whose_image_is_not_there(can_mount: None, fake: FakeDaemon) -> None:
    fake.answer("POST mounts", 201, make_mount(image_path="/no/such/image"))
    fake.answer("DELETE mounts/abc123?lazy=1", 200, make_mount())
    fake.answer("GET mounts", 200, [])
    outcome = finish(start("--socket", fake.socket_path, "image", "run", "/x", "--", "true"))
    assert outcome.code == 4
    assert "/no/such/image" in outcome.one_line()
    assert ("DELETE mounts/abc123?lazy=1", b"") in fake.requests
