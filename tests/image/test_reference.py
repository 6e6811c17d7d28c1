"""References to images: what they mean, and that no text makes the parser stumble."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bootseer.core.errors import UsageError
from bootseer.image.reference import Reference, parse

DIGEST = "sha256:" + "0123456789abcdef" * 4

tags = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", fullmatch=True)
digests = st.from_regex(r"sha256:[0-9a-f]{64}", fullmatch=True)
directories = st.lists(st.text("abcXYZ09._- é", min_size=1, max_size=8), min_size=1, max_size=4).map(
    lambda parts: "/" + "/".join(parts)
)
hosts = st.sampled_from(["host", "host:5000", "127.0.0.1", "[::1]", "[::1]:80", "a.example.org:443"])
urls = st.builds(
    "{}://{}{}".format,
    st.sampled_from(["http", "https"]),
    hosts,
    st.lists(st.from_regex(r"[a-z0-9._~-]{1,8}", fullmatch=True), max_size=3).map(
        lambda parts: "".join(f"/{part}" for part in parts)
    ),
)
locations = directories | urls
# A tag can only follow a path: `http://host:5000` names a port.
with_path = directories | urls.filter(lambda url: "/" in url.partition("://")[2])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/images/train", Reference("/images/train")),
        ("/images/train:v1", Reference("/images/train", tag="v1")),
        (f"/images/train@{DIGEST}", Reference("/images/train", digest=DIGEST)),
        ("train", Reference("train")),
        ("train:v1", Reference("train", tag="v1")),
        ("./a:b/c", Reference("./a:b/c")),
        ("./a:b/c:d", Reference("./a:b/c", tag="d")),
        ("http://host", Reference("http://host")),
        ("http://host:5000", Reference("http://host:5000")),
        ("http://host:5000/", Reference("http://host:5000/")),
        ("http://host:5000/images", Reference("http://host:5000/images")),
        ("http://host:5000/images:v1", Reference("http://host:5000/images", tag="v1")),
        (f"https://host/images@{DIGEST}", Reference("https://host/images", digest=DIGEST)),
        ("/home/me@work:v1", Reference("/home/me@work", tag="v1")),
        ("http://me:secret@host/x:v1", Reference("http://me:secret@host/x", tag="v1")),
        ("http://[::1]:80/x:latest", Reference("http://[::1]:80/x", tag="latest")),
    ],
)
def test_examples(text: str, expected: Reference) -> None:
    assert parse(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/a:",
        "/a:-x",
        "/a:x y",
        "/a:" + "x" * 129,
        "/a@sha256:12",
        f"/a@{DIGEST}0",
        f"/a@{DIGEST.upper()}",
        "/a@sha512:00",
    ],
)
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(UsageError):
        parse(text)


@given(location=locations)
def test_locations_come_back(location: str) -> None:
    assert parse(location) == Reference(location)


@given(location=with_path, tag=tags)
def test_tags_come_back(location: str, tag: str) -> None:
    reference = parse(f"{location}:{tag}")
    assert reference == Reference(location, tag=tag)
    assert parse(str(reference)) == reference


@given(location=locations, digest=digests)
def test_digests_come_back(location: str, digest: str) -> None:
    reference = parse(f"{location}@{digest}")
    assert reference == Reference(location, digest=digest)
    assert parse(str(reference)) == reference


@given(
    text=st.text()
    | st.text("/:@.[]%abhtps \x00\n", max_size=40)
    | st.binary().map(lambda b: b.decode("utf-8", "surrogateescape"))
)
@example("http://")
@example("http://[")
@example("\x00")
@example("x" * 5000)
@example("/" + "a/" * 3000 + ":tag")
def test_any_text_is_a_reference_or_a_usage_error(text: str) -> None:
    try:
        reference = parse(text)
    except UsageError as error:
        assert "\n" not in error.message
        return
    assert reference.location
    assert reference.tag is None or reference.digest is None
    assert parse(str(reference)) == reference


def test_a_directory_that_exists_wins_over_a_tag(tmp_path: Path) -> None:
    (tmp_path / "run:1").mkdir()
    assert parse(f"{tmp_path}/run:1") == Reference(f"{tmp_path}/run:1")
    assert parse(f"{tmp_path}/run:1:tag") == Reference(f"{tmp_path}/run:1", tag="tag")
    assert parse(f"{tmp_path}/run:2") == Reference(f"{tmp_path}/run", tag="2")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.text("ab@:.", min_size=1, max_size=6).filter(lambda name: name not in {".", ".."}))
def test_a_directory_of_any_name_can_be_meant(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(exist_ok=True)
    assert parse(f"{tmp_path}/{name}") == Reference(f"{tmp_path}/{name}")
    assert parse(f"{tmp_path}/{name}@{DIGEST}") == Reference(f"{tmp_path}/{name}", digest=DIGEST)


def test_only_http_needs_a_network() -> None:
    assert parse("http://host/x").is_remote
    assert parse("https://host/x:tag").is_remote
    assert not parse("/data/http://x").is_remote
    assert not parse("ftp.example.org/x").is_remote
