"""What a command in an image is made of. The image is hostile where that costs nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests._rootfs import make_rootfs

from bootseer.core.errors import IntegrityError, UsageError
from bootseer.image.bundle import (
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


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not changed by any test."""
    return make_rootfs(tmp_path_factory.mktemp("bundle") / "root")


def process(root: Path, config: dict[str, Any] | None = None, *argv: str, **wishes: Any) -> dict[str, Any]:
    return resolve_process(root, {"config": config or {}}, Command(argv, **wishes))


# -- paths ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/etc/passwd", "etc/passwd"),
        ("etc/../etc/./passwd", "etc/passwd"),
        ("../../../etc/passwd", "etc/passwd"),
        ("/", "."),
        ("/nothing/at/all", "nothing/at/all"),
        ("/absolute/x", "etc/x"),
        ("/relative/x", "etc/x"),
        ("/upwards/passwd", "etc/passwd"),
        ("/chain/passwd", "etc/passwd"),
        ("/dangling", "no/where"),
        ("/etc/passwd/x", "etc/passwd/x"),
    ],
)
def test_links_stay_inside(tmp_path: Path, path: str, expected: str) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").touch()
    for name, target in (
        ("absolute", "/etc"),
        ("relative", "etc"),
        ("upwards", "../../../../../etc"),
        ("chain", "/absolute/../upwards"),
        ("dangling", "/no/where"),
    ):
        (tmp_path / name).symlink_to(target)
    assert inside(tmp_path, path) == tmp_path / expected


def test_a_loop_of_links(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b/x")
    (tmp_path / "b").symlink_to("a/y")
    with pytest.raises(OSError, match="symbolic links"):
        inside(tmp_path, "/a")
    with pytest.raises(ProgramNotFoundError):
        check_program(tmp_path, {"args": ["/a"], "cwd": "/", "env": []})
    with pytest.raises(UsageError):
        make_directory(tmp_path, "/a/b")


def test_a_working_directory_cannot_leave_the_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    (root / "out").symlink_to(f"../../../../../../..{outside}")
    make_directory(root, "/out/new")
    assert not outside.exists()
    assert (root / str(outside).removeprefix("/") / "new").is_dir()


# -- process -------------------------------------------------------------------------------------------------------


def test_the_image_decides_what_the_user_leaves_open(root: Path) -> None:
    config = {
        "Env": ["A=1", "B=x=y", "PATH=/bin"],
        "Entrypoint": ["/bin/sh", "-c"],
        "Cmd": ["pwd"],
        "WorkingDir": "/work",
        "User": "bob",
    }
    found = process(root, config)
    assert found["args"] == ["/bin/sh", "-c", "pwd"]
    assert found["cwd"] == "/work"
    assert found["user"] == {"uid": 1234, "gid": 1235, "additionalGids": [50, 10]}
    assert set(found["env"]) == {"A=1", "B=x=y", "PATH=/bin", "HOME=/home/bob"}
    found = process(root, config, "ls", env={"A": "2", "HOME": "/x"}, workdir="there", user="0")
    assert found["args"] == ["ls"]
    assert found["cwd"] == "/there"
    assert found["user"]["uid"] == 0
    assert {"A=2", "HOME=/x"} <= set(found["env"])


@pytest.mark.parametrize(
    "config", [{}, {"config": None}, {"config": {"Env": None, "User": None, "Cmd": None}}]
)
def test_a_config_that_says_nothing(root: Path, config: dict[str, Any]) -> None:
    found = resolve_process(root, config, Command(["x"]))
    assert (found["cwd"], found["user"]["uid"], found["terminal"]) == ("/", 0, False)
    with pytest.raises(UsageError, match="no command"):
        resolve_process(root, config, Command([]))


@pytest.mark.parametrize(
    ("user", "uid", "gid", "more", "home"),
    [
        ("", 0, 0, [], "/root"),
        ("bob", 1234, 1235, [50, 10], "/home/bob"),
        ("1234", 1234, 1235, [50, 10], "/home/bob"),
        ("bob:staff", 1234, 50, [], "/home/bob"),
        ("bob:7", 1234, 7, [], "/home/bob"),
        ("4321", 4321, 0, [], "/"),
        ("4321:8", 4321, 8, [], "/"),
        (":staff", 0, 50, [], "/"),
    ],
)
def test_users(root: Path, user: str, uid: int, gid: int, more: list[int], home: str) -> None:
    found = process(root, None, "x", user=user)
    assert found["user"] == {"uid": uid, "gid": gid, "additionalGids": more}
    assert f"HOME={home}" in found["env"]


@pytest.mark.parametrize("user", ["nobody-here", "bob:nogroup", "broken", "short", "-1", "4294967296", "²"])
def test_users_that_are_none(root: Path, user: str) -> None:
    with pytest.raises(UsageError):
        process(root, None, "x", user=user)


def test_only_root_holds_capabilities(root: Path) -> None:
    """Bounding ones stay, so that set-uid programs work as they do in container engines."""
    capabilities = process(root, None, "x")["capabilities"]
    assert capabilities["effective"] == capabilities["permitted"] == capabilities["bounding"] != []
    assert "CAP_SYS_ADMIN" not in capabilities["bounding"]
    others = process(root, None, "x", user="bob")["capabilities"]
    assert others["effective"] == others["permitted"] == []
    assert others["bounding"] == capabilities["bounding"]


@pytest.mark.parametrize(
    "config",
    [
        {"config": [1]},
        {"config": {"Env": "A=1"}},
        {"config": {"Env": [1]}},
        {"config": {"Cmd": {"x": 1}}},
        {"config": {"Cmd": ["a\0b"]}},
        {"config": {"Entrypoint": 5}},
        {"config": {"Cmd": ["x"], "WorkingDir": ["/"]}},
        {"config": {"Cmd": ["x"], "User": 5}},
    ],
)
def test_a_config_of_wrong_types(root: Path, config: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError, match="config is malformed"):
        resolve_process(root, config, Command([]))


@pytest.mark.parametrize("kind", ["fifo", "directory", "loop", "binary", "huge", "outside"])
def test_an_account_file_that_is_none(tmp_path: Path, kind: str) -> None:
    (tmp_path / "etc").mkdir()
    path = tmp_path / "etc/passwd"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "loop":
            path.symlink_to("passwd")
        case "binary":
            path.write_bytes(bytes(range(256)) * 16)
        case "huge":
            with path.open("wb") as file:
                file.truncate(1 << 40)
        case "outside":
            path.symlink_to("../../../../../../etc/passwd")
    with pytest.raises(UsageError, match="has no user root-of-the-host"):
        process(tmp_path, None, "x", user="root-of-the-host")
    assert process(tmp_path, None, "x", user="77")["user"]["uid"] == 77


# -- programs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sh", None),
        ("/bin/sh", None),
        ("../bin/sh", None),
        ("script", ProgramNotFoundError),  # not along PATH
        ("./script", None),
        ("link", ProgramNotFoundError),
        ("/work/link", None),
        ("/work/orphan", ProgramNotFoundError),
        ("./plain", NotExecutableError),
        ("/etc", NotExecutableError),
        ("/etc/passwd/x", ProgramNotFoundError),
    ],
)
def test_programs(root: Path, name: str, kind: type[UsageError] | None) -> None:
    wanted = {"args": [name], "cwd": "/work", "env": ["PATH=/bin:/usr/bin"]}
    if kind is None:
        check_program(root, wanted)
    else:
        with pytest.raises(kind):
            check_program(root, wanted)


def test_odd_scripts(tmp_path: Path) -> None:
    for content in (b"#!\n", b"#!/\0\n", b"#!" + b"x" * 5000, b"", b"#"):
        path = tmp_path / "script"
        path.write_bytes(content)
        path.chmod(0o755)
        try:
            check_program(tmp_path, {"args": ["/script"], "cwd": "/", "env": []})
        except ProgramNotFoundError:
            assert content.startswith(b"#!x")


# -- volumes and the bundle ----------------------------------------------------------------------------------------


def test_volumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert Volume.parse("here:/there") == Volume(f"{tmp_path}/here", "/there", False)
    assert Volume.parse("here:/there//x/:ro") == Volume(f"{tmp_path}/here", "/there/x", True)
    assert Volume.parse("here:/there:rw").read_only is False


@pytest.mark.parametrize(
    "text", ["", "here", ":/x", "here:", "here:x", "here:/x:no", "nothing:/x", "here:/", "here:/a/../b"]
)
def test_volumes_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(UsageError):
        Volume.parse(text)


def test_the_bundle(root: Path) -> None:
    command = Command(["x"], hostname="named", volumes=[Volume("/src", "/dst", True)])
    config = runtime_config(root, process(root, None, "x"), command)
    assert config["hostname"] == "named"
    assert config["root"] == {"path": str(root), "readonly": False}
    assert config["mounts"][-1] == {
        "destination": "/dst",
        "type": "none",
        "source": "/src",
        "options": ["rbind", "ro"],
    }
    assert "network" not in {namespace["type"] for namespace in config["linux"]["namespaces"]}
    assert runtime_config(root, process(root, None, "x"), Command(["x"]))["hostname"] == os.uname().nodename
