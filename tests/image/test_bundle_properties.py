"""Properties of what a command is made of: whatever a foreign image or a user says, and links as the kernel does."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from bootseer.core.errors import IntegrityError, UsageError
from bootseer.image.bundle import (
    Command,
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


def test_the_search_path_is_that_of_the_command(root: Path) -> None:
    for name in ("bin/good", "work/here"):
        (root / name).parent.mkdir()
        (root / name).touch(0o755)
    config: dict[str, Any] = {"config": {"Env": ["PATH=/nowhere"]}}
    with pytest.raises(ProgramNotFoundError):
        check_program(root, process_of(root, config, argv=["good"]))
    check_program(root, process_of(root, config, argv=["good"], env={"PATH": "/x::/work:/bin"}))
    check_program(root, process_of(root, config, argv=["here"], env={"PATH": "work"}))


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
