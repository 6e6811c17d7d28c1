"""Commands in an image that is a plain file: no daemon, every runtime, and nothing that stays behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests._node import mounted, wait_until
from tests._rootfs import make_rootfs
from tests.conftest import missing_for_mounts

from bootseer import native
from bootseer.core.errors import BootseerError
from bootseer.core.mountinfo import mounted_on
from bootseer.image import runtime
from bootseer.image.bundle import Command, NotExecutableError, ProgramNotFoundError, Volume


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EROFS image with a shell."""
    directory = tmp_path_factory.mktemp("runtime")
    make_rootfs(directory / "root")
    native.build_image(
        directory=str(directory / "root"), output_path=str(directory / "image"), spool_dir=str(directory)
    )
    return directory / "image"


@pytest.fixture
def root(image: Path, work_dir: Path) -> Iterator[Path]:
    """Its root, writable."""
    with runtime.root_file_system(str(image), work_dir) as path:
        yield path


@pytest.fixture
def work_dir(tmp_path: Path) -> Iterator[Path]:
    if reason := missing_for_mounts():
        pytest.skip(reason)
    with runtime.temporary_work_dir(tmp_path / "work") as path:
        yield path
    assert list((tmp_path / "work").iterdir()) == []


@pytest.fixture(params=["oci", "namespaces"])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> runtime.RuntimeName:
    """Plain namespaces, and the OCI runtime that works here."""
    if request.param == "namespaces":
        return "namespaces"
    selection = runtime.select("auto", tmp_path_factory.getbasetemp() / "runtimes.json")
    if selection.name == "namespaces":
        pytest.skip(f"no OCI runtime works here: {selection.skipped or 'none is installed'}")
    return selection.name


class Container:
    """Runs commands in one root; what they say to ``/out`` comes back."""

    def __init__(self, root: Path, work_dir: Path, kind: runtime.RuntimeName, out: Path) -> None:
        self.root, self.work_dir, self.kind, self.out = root, work_dir, kind, out

    def run(self, *argv: str, config: Any = None, **command: Any) -> int:
        volumes = [Volume(str(self.out), "/out"), *command.pop("volumes", ())]
        wanted = Command(argv, volumes=volumes, **command)
        return runtime.run(self.root, config or {}, wanted, self.kind, self.work_dir)

    def shell(self, script: str, **command: Any) -> tuple[int, str]:
        (self.out / "said").unlink(missing_ok=True)  # of another user
        code = self.run("sh", "-c", f"{{ {script}\n}} >/out/said", **command)
        return code, (self.out / "said").read_text()


@pytest.fixture
def container(root: Path, work_dir: Path, kind: runtime.RuntimeName, tmp_path: Path) -> Container:
    out = tmp_path / "out"
    out.mkdir()
    out.chmod(0o777)
    return Container(root, work_dir, kind, out)


# ---- commands ----


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 77", 77), ("exit 255", 255)])
def test_exit_codes(container: Container, script: str, code: int) -> None:
    assert container.run("sh", "-c", script) == code


def test_a_death_by_signal(container: Container) -> None:
    # The first process of a pid namespace cannot kill itself.
    assert container.run("sh", "-c", "sh -c 'kill -9 $$'; exit $?") == 137


@pytest.mark.parametrize(
    ("name", "kind_of_error", "code"),
    [
        ("missing", ProgramNotFoundError, 127),
        ("/bin/missing", ProgramNotFoundError, 127),
        ("/work/orphan", ProgramNotFoundError, 127),
        ("/work/plain", NotExecutableError, 126),
        ("/bin", NotExecutableError, 126),
    ],
)
def test_what_cannot_start(
    container: Container, name: str, kind_of_error: type[BootseerError], code: int
) -> None:
    with pytest.raises(kind_of_error) as caught:
        container.run(name)
    assert caught.value.exit_code == code


def test_the_defaults_of_the_image(container: Container) -> None:
    config = {
        "config": {
            "Entrypoint": ["sh", "-c"],
            "Cmd": ['echo "$GREETING|$PWD|$(id -u):$(id -g)" >/out/said'],
            "Env": ["PATH=/bin", "GREETING=hello"],
            "WorkingDir": "/new/place",
            "User": "bob",
        }
    }
    assert container.run(config=config) == 0
    assert (container.out / "said").read_text() == "hello|/new/place|1234:1235\n"


def test_what_the_user_wants(container: Container) -> None:
    assert container.shell(
        'echo "$A|$B|$PWD|$HOME|$(hostname)|$(id -u):$(id -g):$(id -G)"',
        env={"A": "a b=c", "B": ""},
        workdir="/work",
        user="bob",
        hostname="trainer",
    ) == (0, "a b=c||/work|/home/bob|trainer|1234:1235:1235 10 50\n")
    assert container.shell("echo $(id -u):$(id -g):$(id -G)", user="7:8") == (0, "7:8:8\n")


def test_arguments_arrive_as_they_are(container: Container) -> None:
    words = ["", " ", "a b", "'", '"', "$HOME", "\\", "\n", "ü", "-x"]
    assert container.run("sh", "-c", 'printf "<%s>" "$@" >/out/said', "sh", *words) == 0
    assert (container.out / "said").read_text() == "".join(f"<{word}>" for word in words)


def test_volumes(container: Container, tmp_path: Path) -> None:
    for name in ("rw", "ro", "inner"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(f"{name}\n")
    (tmp_path / "single").write_text("single\n")
    volumes = [
        Volume(str(tmp_path / "rw"), "/new/deep/rw"),
        Volume(str(tmp_path / "ro"), "/ro", read_only=True),
        Volume(str(tmp_path / "inner"), "/new/deep/rw/inner"),
        Volume(str(tmp_path / "single"), "/etc/single", read_only=True),
    ]
    script = (
        "cat /new/deep/rw/file /ro/file /new/deep/rw/inner/file /etc/single; echo written >/new/deep/rw/back;"
        "for path in /ro/x /ro/file /etc/single; do (echo x >$path) 2>/dev/null && echo $path; done; true"
    )
    assert container.shell(script, volumes=volumes) == (0, "rw\nro\ninner\nsingle\n")
    assert (tmp_path / "rw/back").read_text() == "written\n"
    assert (tmp_path / "ro/file").read_text() == "ro\n"


def test_a_volume_behind_a_link_of_the_image(container: Container, tmp_path: Path) -> None:
    (container.root / "real").mkdir()
    (container.root / "link").symlink_to("/real")
    (container.root / "out-of-it").symlink_to(tmp_path / "host")
    (tmp_path / "host").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/file").write_text("data\n")
    volumes = [
        Volume(str(tmp_path / "data"), "/link"),
        Volume(str(tmp_path / "data"), "/link/below"),
        Volume(str(tmp_path / "data"), "/out-of-it/x"),
    ]
    assert container.shell("cat /real/file", volumes=volumes) == (0, "data\n")
    assert list((tmp_path / "host").iterdir()) == []


def test_what_is_written_stays_in_the_overlay(image: Path, container: Container) -> None:
    before = image.stat()
    assert container.run("sh", "-c", "echo new >/etc/new && echo more >>/etc/passwd && : >/work/plain") == 0
    assert (container.root / "etc/new").read_text() == "new\n"
    assert (container.root / "work/plain").read_text() == ""
    after = image.stat()
    assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)


def test_devices(container: Container) -> None:
    script = (
        "test -c /dev/null && test -c /dev/zero && test -c /dev/urandom && test -d /dev/shm && test -e /dev/ptmx"
        " && echo x >/dev/null && echo y >/dev/shm/y && echo via | cat /dev/stdin && cat /proc/sys/kernel/ostype"
        " && test -d /sys/kernel && ! touch /sys/x 2>/dev/null"
    )
    assert container.shell(script) == (0, "via\nLinux\n")


def test_the_command_sees_only_itself(container: Container) -> None:
    code, said = container.shell("for p in /proc/[0-9]*; do echo $p; done; cat /proc/self/mountinfo")
    assert code == 0
    processes = [line for line in said.splitlines() if line.startswith("/proc/")]
    assert len(processes) <= 3
    assert " /old" not in said


CHILD = """
import sys
from pathlib import Path
from bootseer.image import runtime
from bootseer.image.bundle import Command, Volume
image, work, kind, out, *argv = sys.argv[1:]
with runtime.temporary_work_dir(Path(work)) as work_dir, runtime.root_file_system(image, work_dir) as root:
    sys.exit(runtime.run(root, {}, Command(argv, volumes=[Volume(out, "/out")]), kind, work_dir))
"""


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1]
)
def test_signals_reach_a_trap(image: Path, kind: str, tmp_path: Path, number: signal.Signals) -> None:
    if reason := missing_for_mounts():
        pytest.skip(reason)
    (tmp_path / "out").mkdir()
    script = (
        f"trap 'echo caught >/out/caught; exit 42' {number.name.removeprefix('SIG')};"
        " echo >/out/ready; while :; do sleep 0.02; done"
    )
    words = [sys.executable, "-c", CHILD, str(image), str(tmp_path / "work"), kind, str(tmp_path / "out")]
    process = subprocess.Popen([*words, "sh", "-c", script])
    try:
        wait_until((tmp_path / "out/ready").exists, "the command runs")
        process.send_signal(number)
        assert process.wait(30) == 42
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "out/caught").exists()
    assert list((tmp_path / "work").iterdir()) == []
    assert not [path for path in mounted() if path.is_relative_to(tmp_path)]


# ---- file systems ----


def test_a_root_is_undone_after_an_exception(image: Path, work_dir: Path) -> None:
    with pytest.raises(KeyboardInterrupt), runtime.root_file_system(str(image), work_dir) as root:
        assert (root / "bin/sh").exists()
        raise KeyboardInterrupt
    assert not [path for path in mounted() if path.is_relative_to(work_dir)]


def test_a_root_in_use_is_undone_all_the_same(image: Path, work_dir: Path) -> None:
    with runtime.root_file_system(str(image), work_dir) as root:
        file = (root / "etc/passwd").open()
    with file:
        assert not [path for path in mounted() if path.is_relative_to(work_dir)]
        assert file.read().startswith("root:")


def test_what_is_kept_of_an_overlay(image: Path, work_dir: Path, tmp_path: Path) -> None:
    for _ in range(2):
        with (
            runtime.root_file_system(str(image), work_dir, tmp_path / "kept") as root,
            (root / "etc/log").open("a") as log,
        ):
            log.write("again\n")
    assert (tmp_path / "kept/upper/etc/log").read_text() == "again\nagain\n"


def test_what_is_mounted_on_a_directory(image: Path, work_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "a place \\ with\todd names"
    target.mkdir()
    assert mounted_on(target) is None
    with runtime.mounted_erofs(str(image), target):
        entry = mounted_on(target)
        assert entry is not None
        assert entry.file_system == "erofs"
        assert entry.source == str(image) or entry.source.startswith("/dev/loop")
    assert mounted_on(target) is None


# ---- work directories ----


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    trap = tmp_path / "bootseer-run-trap"
    trap.mkdir()
    (tmp_path / "file").touch()
    (trap / "lock").symlink_to(tmp_path / "file")
    runtime.remove_abandoned(tmp_path)
    assert trap.is_dir()


def test_what_is_mounted_is_never_removed(work_dir: Path, tmp_path: Path) -> None:
    """Removing a tree over a volume of the user would be the worst that we could do."""
    place = tmp_path / "bootseer-run-dead"
    (place / "volume").mkdir(parents=True)
    (place / "lock").touch()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").touch()
    native.mount_bind(str(tmp_path / "precious"), str(place / "volume"))
    try:
        runtime.remove_abandoned(tmp_path)
        runtime.remove_tree(place)
        assert (tmp_path / "precious/file").exists()
    finally:
        native.umount(str(place / "volume"))
    runtime.remove_abandoned(tmp_path)
    assert not place.exists()
