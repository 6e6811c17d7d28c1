"""What a command in an image is made of. The image is foreign: its links, accounts and config may hold anything."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from bootseer.core.errors import BootseerError, IntegrityError, UsageError
from bootseer.image.bundle import (
    NOT_EXECUTABLE,
    NOT_FOUND,
    Command,
    NotExecutableError,
    ProgramNotFoundError,
    Volume,
    check_program,
    inside,
    make_directory,
    resolve_process,
    runtime_config,
)

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An image with accounts."""
    path = tmp_path / "root"
    (path / "etc").mkdir(parents=True)
    (path / "etc/passwd").write_text(
        "root:x:0:0::/root:/bin/sh\nbob:x:1234:1235::/home/bob:\nnohome:x:7:8:::\nbroken:x:many:1::/:\nshort:x\n"
    )
    (path / "etc/group").write_text(
        "root:x:0:\nstaff:x:50:bob,alice\nbob:x:1235:\nwheel:x:10:bob\nodd:x:y:bob\n"
    )
    return path


def process_of(root: Path, config: Any = None, **command: Any) -> dict[str, Any]:
    return resolve_process(root, config or {}, Command(**{"argv": ["sh"], **command}))


def environment(process: dict[str, Any]) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in process["env"])


# ---- paths of the image ----


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_SYS_OPENAT2 = 437
_RESOLVE_IN_ROOT = 0x10


def by_kernel(root: Path, path: str) -> str | None:
    """What the kernel makes of a path when ``root`` is the root; ``None`` when it refuses."""
    how = _OpenHow(os.O_PATH | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT)
    at = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.syscall(_SYS_OPENAT2, at, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
    finally:
        os.close(at)
    if fd < 0:
        return None
    try:
        return str(Path(f"/proc/self/fd/{fd}").readlink())
    finally:
        os.close(fd)


names = st.sampled_from(["a", "b", "c", ".."])
paths = st.lists(names, min_size=1, max_size=4).map("/".join)
places = st.lists(st.sampled_from("abc"), min_size=1, max_size=3)
targets = st.builds(lambda absolute, path: absolute + path, st.sampled_from(["", "/"]), paths)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    entries=st.lists(
        st.tuples(st.lists(st.sampled_from("abc"), min_size=1, max_size=3), st.none() | targets), max_size=8
    ),
    asked=targets,
)
def test_links_lead_where_the_kernel_says(
    tmp_path: Path, entries: list[tuple[list[str], str | None]], asked: str
) -> None:
    root = tmp_path / "root"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for parts, target in entries:
        path = root.joinpath(*parts)
        try:
            parent = inside(root, "/".join(parts[:-1]) or "/")
            parent.mkdir(parents=True, exist_ok=True)
            path = parent / parts[-1]
            if target is None:
                path.mkdir()
            else:
                path.symlink_to(target)
        except OSError:  # it exists, or leads through a loop
            continue
    expected = by_kernel(root, asked)
    assume(expected is not None)
    assert str(inside(root, asked)) == expected


def test_nothing_leads_out_of_the_image(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "up").symlink_to("../../../../etc")
    (root / "abs").symlink_to("/etc/passwd")
    (root / "loop").symlink_to("loop")
    assert inside(root, "/up/passwd") == root / "etc/passwd"
    assert inside(root, "/abs") == root / "etc/passwd"
    assert inside(root, "../../x") == root / "x"
    assert inside(root, "/") == root
    with pytest.raises(OSError, match="symbolic links"):
        inside(root, "/loop/x")


def test_making_a_directory(root: Path, tmp_path: Path) -> None:
    make_directory(root, "/new/deep")
    assert (root / "new/deep").is_dir()
    make_directory(root, "/new/deep")
    (root / "out").symlink_to(tmp_path / "host")
    make_directory(root, "/out/made")
    assert not (tmp_path / "host").exists()
    for path in ("/etc/passwd", "/etc/passwd/x"):
        with pytest.raises(UsageError, match="cannot be a directory"):
            make_directory(root, path)


# ---- accounts ----


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("", (0, 0, [], "/root")),
        ("root", (0, 0, [], "/root")),
        ("0", (0, 0, [], "/root")),
        ("bob", (1234, 1235, [50, 10], "/home/bob")),
        ("1234", (1234, 1235, [50, 10], "/home/bob")),
        ("bob:staff", (1234, 50, [], "/home/bob")),
        ("bob:77", (1234, 77, [], "/home/bob")),
        ("bob:", (1234, 1235, [50, 10], "/home/bob")),
        (":staff", (0, 50, [], "/")),
        ("999", (999, 0, [], "/")),
        ("999:999", (999, 999, [], "/")),
        ("nohome", (7, 8, [], "/")),
        (str(2**32 - 2), (2**32 - 2, 0, [], "/")),
    ],
)
def test_users(root: Path, user: str, expected: tuple[int, int, list[int], str]) -> None:
    process = process_of(root, user=user)
    found = process["user"]
    assert (found["uid"], found["gid"], found["additionalGids"], environment(process)["HOME"]) == expected
    assert bool(process["capabilities"]["effective"]) == (expected[0] == 0)


@pytest.mark.parametrize(
    "user",
    [
        "nobody",
        "short",
        "broken",
        "bob:none",
        "-1",
        "1.5",
        "bob:-1",
        str(2**32),
        str(2**32 - 1),
        "9" * 5000,
        "1:" + "9" * 5000,
        "²",
        "a b",
    ],
)
def test_users_that_are_none(root: Path, user: str) -> None:
    with pytest.raises(UsageError):
        process_of(root, user=user)


@pytest.mark.parametrize("name", ["passwd", "group"])
@pytest.mark.parametrize("kind", ["missing", "fifo", "directory", "loop", "binary", "outside", "digits"])
def test_accounts_of_every_kind(root: Path, tmp_path: Path, name: str, kind: str) -> None:
    path = root / "etc" / name
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(name)
    elif kind == "binary":
        path.write_bytes(bytes(range(256)) * 100)
    elif kind == "outside":
        (tmp_path / "host").write_text("evil:x:0:0:::\n")
        path.symlink_to(tmp_path / "host")
    elif kind == "digits":
        path.write_text(f"x:x:{'9' * 5000}:1234:::\ny:x:{'9' * 5000}:1234\n")
    process = process_of(root, user="1234")
    assert process["user"]["uid"] == 1234
    with pytest.raises(UsageError):
        process_of(root, user="evil")


def test_an_endless_file_of_accounts_is_not_read_to_its_end(root: Path) -> None:
    with (root / "etc/passwd").open("wb") as file:
        file.truncate(1 << 40)
    assert process_of(root, user="5")["user"]["uid"] == 5


# ---- the process ----


def test_what_the_image_says_and_what_the_user_says(root: Path) -> None:
    image = {
        "Env": ["A=image", "B=image", "EMPTY=", "PATH=/image"],
        "Entrypoint": ["/entry", "point"],
        "Cmd": ["command"],
        "User": "bob",
        "WorkingDir": "/work",
    }
    process = resolve_process(root, {"config": image}, Command([]))
    assert process["args"] == ["/entry", "point", "command"]
    assert process["cwd"] == "/work"
    assert process["user"]["uid"] == 1234
    wanted = {"A": "image", "B": "image", "EMPTY": "", "PATH": "/image", "HOME": "/home/bob"}
    assert environment(process) == wanted

    command = Command(["x", "y"], env={"B": "user", "HOME": "/h", "C": "a=b"}, workdir="/w", user="0")
    process = resolve_process(root, {"config": image}, command)
    assert process["args"] == ["x", "y"]
    assert process["cwd"] == "/w"
    assert process["user"]["uid"] == 0
    assert environment(process) == {**wanted, "B": "user", "HOME": "/h", "C": "a=b"}


def test_what_nobody_says(root: Path) -> None:
    process = process_of(root)
    assert environment(process) == {"PATH": DEFAULT_PATH, "HOME": "/root"}
    assert process["cwd"] == "/"
    configs: list[dict[str, Any]] = [{}, {"config": None}, {"config": {"Cmd": []}}, {"config": {"Cmd": [""]}}]
    for config in configs:
        with pytest.raises(UsageError, match="no command"):
            resolve_process(root, config, Command([]))


@pytest.mark.parametrize(("workdir", "cwd"), [("a/b", "/a/b"), ("/a//b/", "/a/b"), (".", "/")])
def test_working_directories_are_absolute(root: Path, workdir: str, cwd: str) -> None:
    assert process_of(root, workdir=workdir)["cwd"] == cwd


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("ab=:/\0", max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["Env", "Entrypoint", "Cmd", "User", "WorkingDir"]), inner, max_size=5
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=json_values)
def test_no_config_makes_us_stumble(root: Path, value: object) -> None:
    try:
        process = resolve_process(root, {"config": value}, Command([]))
    except (UsageError, IntegrityError) as error:
        assert "\n" not in error.message
        return
    assert process["args"][0]
    assert process["cwd"].startswith("/")
    assert all("\0" not in text for text in (*process["args"], *process["env"], process["cwd"]))
    json.dumps(runtime_config(root, process, Command([])))


# ---- volumes ----


@pytest.mark.parametrize(
    ("text", "target", "read_only"),
    [
        ("{}:/data", "/data", False),
        ("{}:/data:rw", "/data", False),
        ("{}:/data:ro", "/data", True),
        ("{}:/a//b/", "/a/b", False),
    ],
)
def test_volumes(tmp_path: Path, text: str, target: str, read_only: bool) -> None:
    assert Volume.parse(text.format(tmp_path)) == Volume(str(tmp_path), target, read_only)


def test_a_relative_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    assert Volume.parse("data:/data").source == str(tmp_path / "data")


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "/tmp",
        "/tmp:",
        "/tmp:data",
        ":/data",
        "/tmp:/data:x",
        "/tmp:/data:ro:x",
        "/tmp:/",
        "/tmp://",
        "/tmp:/../x",
        "/tmp:/a/..",
        "/no/such:/data",
    ],
)
def test_what_is_no_volume(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Volume.parse(text)
    assert "\n" not in caught.value.message


@given(text=st.text(":/ab.\0\n", max_size=10))
def test_any_text_is_a_volume_or_a_usage_error(text: str) -> None:
    try:
        volume = Volume.parse(text)
    except UsageError:
        return
    assert volume.target.startswith("/")
    assert volume.source.startswith("/")


# ---- programs ----


@pytest.fixture
def programs(root: Path) -> Path:
    (root / "bin").mkdir()
    (root / "work").mkdir()
    for name, (mode, content) in {
        "bin/good": (0o755, b"\x7fELF" + struct.pack("<Q", 0)),
        "bin/plain": (0o644, b"text"),
        "bin/script": (0o755, b"#!/bin/good -x\n"),
        "bin/orphan": (0o755, b"#!/no/such\n"),
        "bin/spaced": (0o755, b"#!   /bin/good\n"),
        "bin/odd": (0o755, b"#!\n"),
        "bin/long": (0o755, b"#!/" + b"x" * 5000),
        "work/good": (0o644, b"not this one"),
        "work/here": (0o755, b"x"),
    }.items():
        (root / name).write_bytes(content)
        (root / name).chmod(mode)
    (root / "bin/link").symlink_to("/bin/good")
    (root / "bin/dangling").symlink_to("/nowhere")
    (root / "bin/loop").symlink_to("loop")
    (root / "bin/directory").mkdir()
    return root


@pytest.mark.parametrize(
    "name", ["good", "script", "spaced", "odd", "link", "/bin/good", "./here", "../bin/good"]
)
def test_programs(programs: Path, name: str) -> None:
    check_program(programs, process_of(programs, argv=[name], workdir="/work"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("missing", ProgramNotFoundError),
        ("/bin/missing", ProgramNotFoundError),
        ("here", ProgramNotFoundError),  # not along PATH
        ("dangling", ProgramNotFoundError),
        ("loop", ProgramNotFoundError),
        ("orphan", ProgramNotFoundError),
        ("long", ProgramNotFoundError),
        ("good/x", ProgramNotFoundError),
        ("plain", NotExecutableError),
        ("directory", NotExecutableError),
        ("/bin", NotExecutableError),
        ("./good", NotExecutableError),
    ],
)
def test_what_is_no_program(programs: Path, name: str, kind: type[BootseerError]) -> None:
    with pytest.raises(kind) as caught:
        check_program(programs, process_of(programs, argv=[name], workdir="/work"))
    assert caught.value.exit_code == (NOT_FOUND if kind is ProgramNotFoundError else NOT_EXECUTABLE)


def test_the_search_path_is_that_of_the_command(programs: Path) -> None:
    config: dict[str, Any] = {"config": {"Env": ["PATH=/nowhere"]}}
    with pytest.raises(ProgramNotFoundError):
        check_program(programs, process_of(programs, config, argv=["good"]))
    check_program(programs, process_of(programs, config, argv=["good"], env={"PATH": "/x::/work:/bin"}))
    check_program(programs, process_of(programs, config, argv=["here"], env={"PATH": "work"}))


# ---- the bundle ----


def test_the_bundle(root: Path, tmp_path: Path) -> None:
    command = Command(
        ["sh"], hostname="trainer", volumes=[Volume("/a", "/one", True), Volume("/b", "/one/two")]
    )
    config = runtime_config(root, process_of(root), command)
    assert json.loads(json.dumps(config)) == config
    assert config["root"] == {"path": str(root), "readonly": False}
    assert config["hostname"] == "trainer"
    # Volumes come last, in their order: one may lie in another, or cover what the system needs.
    assert [mount["destination"] for mount in config["mounts"]][-2:] == ["/one", "/one/two"]
    assert [mount["options"] for mount in config["mounts"]][-2:] == [["rbind", "ro"], ["rbind", "rw"]]
    assert {"type": "network"} not in config["linux"]["namespaces"]


def test_the_host_name_is_the_hosts_unless_given(root: Path) -> None:
    assert runtime_config(root, process_of(root), Command([]))["hostname"] == platform.node()
