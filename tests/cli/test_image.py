"""The verbs of ``bootseer image`` but ``run``, with a real daemon."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests._node import Node, mounted, wait_until
from tests._rootfs import make_rootfs
from tests.cli.conftest import Bootseer, FakeDaemon, command, make_mount

from bootseer import native


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where to mount."""
    path = tmp_path / "a target"
    path.mkdir()
    return path


# -- convert -------------------------------------------------------------------------------------------------------


def test_convert(bootseer: Bootseer, tmp_path: Path) -> None:
    root = make_rootfs(tmp_path / "root")
    outcome = bootseer("image", "convert", root, tmp_path / "layout", "--tag", "v1", "--json")
    assert outcome.code == 0, outcome.err
    report = outcome.json
    assert set(report) == {
        *("digest", "tag", "image_bytes", "blob_bytes", "meta_bytes", "chunks", "files", "elapsed_s")
    }
    again = bootseer("image", "convert", root, tmp_path / "layout", "--tag", "v2")
    assert again.out == f"{tmp_path}/layout@{report['digest']}\n"
    inspected = bootseer("image", "inspect", f"{tmp_path}/layout:v1", "--json").json
    assert {key: inspected[key] for key in ("digest", "image_bytes", "blob_bytes", "chunks")} == {
        key: report[key] for key in ("digest", "image_bytes", "blob_bytes", "chunks")
    }


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("nothing", "layout"), 4),
        (("file", "layout"), 2),
        (("root", "layout", "--average-chunk", "5"), 2),
        (("root", "layout", "--tag", "a b"), 2),
        (("root", "file"), 2),
        (("root:tag", "layout"), 2),
    ],
)
def test_convert_mistakes(
    bootseer: Bootseer, tmp_path: Path, arguments: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "root").mkdir()
    (tmp_path / "file").write_text("x")
    outcome = bootseer("image", "convert", *arguments)
    assert outcome.code == code
    assert outcome.one_line()
    assert not (tmp_path / "layout/index.json").exists()


# -- mount and umount ----------------------------------------------------------------------------------------------


def test_mount_and_umount(daemon: Node, bootseer: Bootseer, shell_image: Path, target: Path) -> None:
    outcome = bootseer("image", "mount", shell_image, target)
    assert outcome.code == 0, outcome.err
    mount_id = outcome.out.strip()
    assert (target / "work/plain").read_text() == "no program\n"
    with pytest.raises(OSError, match="Read-only"):
        (target / "new").touch()
    listed = bootseer("image", "ls")
    assert str(target) in listed.out
    assert mount_id in listed.out
    again = bootseer("image", "mount", shell_image, target)
    assert again.code == 2
    assert "already" in again.one_line()
    assert bootseer("image", "umount", target).code == 0
    assert list(target.iterdir()) == []


def test_by_a_relative_name_a_link_and_an_id(
    daemon: Node, bootseer: Bootseer, shell_image: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(target.parent)
    link = target.parent / "link"
    link.symlink_to(target)
    for mount_name, umount_name in (("a target", "link"), ("link", "a target"), ("a target", "")):
        made = bootseer("image", "mount", os.path.relpath(shell_image), mount_name, "--json")
        assert made.code == 0, made.err
        assert made.json["target"] == str(target)
        assert made.json["erofs"].startswith(("file", "loop"))
        undone = bootseer("image", "umount", umount_name or made.json["mount"]["id"], "--json")
        assert undone.code == 0, undone.err
        assert undone.json["mount"]["id"] == made.json["mount"]["id"]
        assert daemon.client.mounts() == []


def test_a_busy_mount(daemon: Node, bootseer: Bootseer, shell_image: Path, target: Path) -> None:
    assert bootseer("image", "mount", shell_image, target).code == 0
    with (target / "work/plain").open() as file:
        outcome = bootseer("image", "umount", target)
        assert outcome.code == 2
        assert "is busy (end its users, or use --lazy)" in outcome.one_line()
        assert bootseer("image", "umount", target, "--lazy").code == 0
        assert list(target.iterdir()) == []
        assert file.read() == "no program\n"
    wait_until(lambda: not daemon.mounts(), "the mount ends with its last user")


def test_what_else_is_mounted_there_stays(
    daemon: Node, bootseer: Bootseer, shell_image: Path, target: Path
) -> None:
    """Somebody has unmounted the image by hand and mounted something else in its place."""
    assert bootseer("image", "mount", shell_image, target).code == 0
    native.umount(str(target))
    subprocess.run(["mount", "-t", "tmpfs", "none", str(target)], check=True)
    try:
        assert bootseer("image", "umount", target).code == 0
        assert daemon.client.mounts() == []
        assert mounted().count(target) == 1
        assert bootseer("image", "umount", target).code == 4
    finally:
        native.umount(str(target))


def test_an_image_that_its_daemon_has_lost(
    daemon: Node, bootseer: Bootseer, shell_image: Path, target: Path
) -> None:
    assert bootseer("image", "mount", shell_image, target).code == 0
    daemon.client.unmount(daemon.client.mounts()[0].id, lazy=True)
    assert target in mounted()
    assert bootseer("image", "umount", target).code == 0
    assert target not in mounted()


def test_mount_mistakes(
    daemon: Node, bootseer: Bootseer, shell_image: Path, target: Path, image: object, tmp_path: Path
) -> None:
    layout = image.layout  # type: ignore[attr-defined]
    for words, code in (
        ((shell_image, target / "nothing"), 2),
        ((tmp_path / "nothing", target), 4),
        ((f"{shell_image}:none", target), 4),
        ((f"{shell_image}@sha256:12", target), 2),
        ((f"{shell_image}@sha256:{'0' * 64}", target), 4),
        ((layout, target), 5),  # its bytes are no file system
    ):
        outcome = bootseer("image", "mount", *words)
        assert outcome.code == code, outcome
        assert outcome.one_line()
        assert daemon.client.mounts() == []
    assert bootseer("image", "umount", target).code == 4
    assert bootseer("image", "umount", "nothing").code == 4


def test_a_mount_that_fails_is_undone(
    can_mount: None, fake: FakeDaemon, bootseer: Bootseer, target: Path
) -> None:
    fake.answer("GET mounts", 200, [])
    fake.answer("POST mounts", 201, make_mount(image_path="/no/such/image"))
    fake.answer("DELETE mounts/abc123?lazy=1", 200, make_mount())
    outcome = bootseer("--socket", fake.socket_path, "image", "mount", "/x", target)
    assert outcome.code == 4
    assert fake.requests[-1][0] == "DELETE mounts/abc123?lazy=1"


# -- traces and prefetch -------------------------------------------------------------------------------------------


def test_trace_prefetch_and_ls(daemon: Node, bootseer: Bootseer, shell_image: Path, tmp_path: Path) -> None:
    image = tmp_path / "own"
    shutil.copytree(shell_image, image)
    (image / "extra").touch()
    digest = bootseer("image", "inspect", image, "--json").json["digest"]
    for directory in (daemon.state_dir / "traces").iterdir():
        shutil.rmtree(directory)
    for verb in ("trace", "prefetch"):
        outcome = bootseer("image", verb, image)
        assert outcome.code == 4
        assert "has no trace yet" in outcome.one_line()

    words = command("image", "run", "--runtime", "namespaces", image, "--", "cat", "/work/plain")
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    trace = bootseer("image", "trace", image, "--json").json
    assert trace["digest"] == digest
    assert trace["recordings"] == 1
    assert 0 < trace["hot_chunks"] <= trace["chunks"]
    assert trace["records"][0]["t_ns"] <= trace["records"][-1]["t_ns"]
    text = bootseer("image", "trace", image, "--top", "2").out
    assert len(text.splitlines()) == 4 + 1 + 1 + 2

    hot = bootseer("image", "prefetch", image, "--json").json
    assert hot["chunks"] == trace["hot_chunks"]
    everything = bootseer("image", "prefetch", image, "--all", "--json").json
    assert everything["chunks"] == trace["chunks"]
    assert bootseer("image", "prefetch", image, "--all", "--json").json["fetched_bytes"] == 0
    assert "chunks are here" in bootseer("image", "prefetch", image).one_line()

    listed = bootseer("image", "ls", "--json").json
    known = next(entry for entry in listed["images"] if entry["digest"] == digest)
    assert known["recordings"] == 1
    assert known["cached_bytes"] > 0
    assert listed["mounts"] == []


def test_of_a_mount(daemon: Node, bootseer: Bootseer, shell_image: Path, target: Path) -> None:
    """A mount is named by its directory or id, and means exactly the image that is mounted."""
    assert bootseer("image", "mount", shell_image, target).code == 0
    try:
        inspected = bootseer("image", "inspect", target, "--json").json
        assert inspected["mount"]["label"] == f"mount:{target}"
        assert inspected["statistics"]["file.image_bytes"] > 0
        mount_id = inspected["mount"]["id"]
        assert (
            bootseer("image", "prefetch", mount_id, "--all", "--json").json["digest"]
            == inspected["mount"]["digest"]
        )
        assert "file.hits" in bootseer("image", "inspect", mount_id).out
        (target / "work/plain").read_bytes()
    finally:
        assert bootseer("image", "umount", target).code == 0


def test_inspect_needs_no_daemon(bootseer: Bootseer, shell_image: Path, tmp_path: Path) -> None:
    outcome = bootseer("--socket", tmp_path / "nothing.sock", "image", "inspect", shell_image)
    assert outcome.code == 0, outcome.err
    assert "stored_over_image" in outcome.out


# -- what programs rely on -----------------------------------------------------------------------------------------


def documented() -> dict[str, set[str]]:
    """The keys of each verb's ``--json`` in docs/cli.md."""
    text = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    rows = re.findall(r"^\| `([a-zA-Z ]+)` \| (.*) \|$", text, re.MULTILINE)
    words = {verb: re.findall(r"`([a-z_ ]+)`", keys) for verb, keys in rows}
    return {verb: set(found[0].split()) for verb, found in words.items() if found}


def test_the_keys_of_json_are_the_documented_ones(
    daemon: Node, bootseer: Bootseer, tmp_path: Path, target: Path
) -> None:
    known = documented()
    root, layout = make_rootfs(tmp_path / "root"), tmp_path / "layout"
    found = {"image convert": set(bootseer("image", "convert", root, layout, "--json").json)}
    words = command("image", "run", "--runtime", "namespaces", "--json", layout, "--", "true")
    ran = subprocess.run(words, check=True, capture_output=True, text=True)
    found["image run"] = set(json.loads(ran.stderr))
    found["image mount"] = set(bootseer("image", "mount", layout, target, "--json").json)
    for verb, arguments in (
        ("status", []),
        ("image trace", [layout]),
        ("image prefetch", [layout, "--all"]),
        ("image ls", []),
        ("image umount", [target]),
        ("image inspect", [layout]),
    ):
        found[verb] = set(bootseer(*verb.split(), *arguments, "--json").json)
    assert found["image run"] == known["image run"]
    found["image inspect REF"] = found.pop("image inspect")
    assert {verb: found[verb] for verb in found} == {verb: known[verb] for verb in found}
