"""From a reference to an image, from directories and from web servers of every kind."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.conftest import StoredImage
from tests.image import _web
from tests.image._oci import OciLayout, blob_file, snapshot, tagged
from tests.image._web import Web, served

from bootseer import native
from bootseer.core.errors import (
    BackendUnavailableError,
    BootseerError,
    IntegrityError,
    NotFoundError,
    PermissionDeniedError,
    TimeoutExpiredError,
    UsageError,
)
from bootseer.image import layout
from bootseer.image.resolve import resolve


@pytest.fixture
def web(image: StoredImage, tmp_path: Path) -> Any:
    root = tmp_path / "www"
    shutil.copytree(image.layout, root / "image")
    with served(root) as running:
        yield running


def manifest_of(root: Path) -> dict[str, Any]:
    entry = json.loads((root / "index.json").read_text())["manifests"][0]
    value: dict[str, Any] = json.loads((root / layout.blob_path(entry["digest"])).read_bytes())
    return value


def digest_of(root: Path) -> str:
    return str(json.loads((root / "index.json").read_text())["manifests"][0]["digest"])


def blob_name(root: Path, which: str) -> str:
    """The path of a document of the image below its layout."""
    manifest = manifest_of(root)
    descriptor = {
        "manifest": {"digest": digest_of(root)},
        "config": manifest["config"],
        "chunk map": manifest["layers"][0],
    }[which]
    return layout.blob_path(descriptor["digest"])


def one_line(error: BootseerError) -> bool:
    return "\n" not in error.message and not error.message.endswith(".")


# ---- a directory ----


def test_a_directory(image: StoredImage) -> None:
    found = resolve(f"{image.layout}:latest")
    assert found.manifest_digest == digest_of(image.layout)
    assert native.ChunkMap.parse(found.chunk_map).image_bytes == len(image.raw)
    assert found.blobs[0].digest == f"sha256:{image.content.key}"
    assert found.blobs[0].bytes == len(image.content.blob)
    assert blob_file(found).read_bytes() == image.content.blob
    assert blob_file(found).is_absolute()
    assert found.config == {"config": {"Cmd": ["/bin/true"]}}


def test_a_relative_directory(image: StoredImage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(image.layout.parent)
    found = resolve(image.layout.name)
    monkeypatch.chdir("/")
    assert blob_file(found).exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"artifactType": "application/vnd.other"}, "no bootseer image"),
        ({"artifactType": None}, "no bootseer image"),
        ({"artifactType": []}, "no bootseer image"),
        ({"annotations": {layout.FORMAT_ANNOTATION: "2"}}, "unknown image format '2'"),
        ({"annotations": {}}, "unknown image format"),
        ({"annotations": ["x"]}, "unknown image format"),
        ({"config": None}, "no config"),
        ({"config": {"digest": "sha256:12"}}, "not a sha256 digest"),
        ({"layers": []}, "0 layers of type"),
        ({"layers": {}}, "no list of layers"),
        ({"layers": [{"mediaType": []}]}, "0 layers of type"),
    ],
)
def test_a_manifest_that_is_none_of_ours(
    image: StoredImage, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    root = tmp_path / "layout"
    shutil.copytree(image.layout, root)
    data = json.dumps({**manifest_of(root), **change}).encode()
    digest = layout.digest_of(data)
    (root / layout.blob_path(digest)).write_bytes(data)
    with pytest.raises(IntegrityError, match=message) as caught:
        resolve(f"{root}@{digest}")
    assert one_line(caught.value)


def test_the_map_of_another_blob_is_refused(image: StoredImage, tmp_path: Path) -> None:
    """The cache files chunks under the digest of the blob: a wrong map would poison it."""
    root = tmp_path / "layout"
    shutil.copytree(image.layout, root)
    manifest = manifest_of(root)
    other = b"another blob"
    digest = layout.digest_of(other)
    (root / layout.blob_path(digest)).write_bytes(other)
    manifest["layers"][1] = {**manifest["layers"][1], "digest": digest}
    data = json.dumps(manifest).encode()
    (root / layout.blob_path(layout.digest_of(data))).write_bytes(data)
    with pytest.raises(IntegrityError, match="another blob"):
        resolve(f"{root}@{layout.digest_of(data)}")


@pytest.mark.parametrize("which", ["manifest", "config", "chunk map"])
@pytest.mark.parametrize("how", ["missing", "changed", "empty", "directory"])
def test_a_damaged_document_is_refused(image: StoredImage, tmp_path: Path, which: str, how: str) -> None:
    root = tmp_path / "layout"
    shutil.copytree(image.layout, root)
    path = root / blob_name(root, which)
    data = path.read_bytes()
    path.unlink()
    if how == "changed":
        path.write_bytes(data[:-1] + b"\0")
    elif how == "empty":
        path.touch()
    elif how == "directory":
        path.mkdir()
    kinds = {"missing": NotFoundError, "directory": BackendUnavailableError}
    with pytest.raises(kinds.get(how, IntegrityError)) as caught:
        resolve(str(root))
    assert one_line(caught.value)


def test_an_image_that_is_not_converted_says_what_to_do(tmp_path: Path) -> None:
    oci = OciLayout(tmp_path / "oci")
    oci.write_index(tagged(oci.image(b"layer"), "v1"))
    with pytest.raises(IntegrityError, match="no bootseer image") as caught:
        resolve(f"{oci.root}:v1")
    assert "image convert" in (caught.value.hint or "")


def test_what_is_not_there(image: StoredImage, tmp_path: Path) -> None:
    for reference in (str(tmp_path / "missing"), f"{tmp_path}/missing:tag", "missing"):
        with pytest.raises(NotFoundError, match="not a directory"):
            resolve(reference)
    (tmp_path / "file").touch()
    with pytest.raises(NotFoundError, match="not a directory"):
        resolve(str(tmp_path / "file"))
    with pytest.raises(NotFoundError, match="no image v9") as caught:
        resolve(f"{image.layout}:v9")
    assert caught.value.hint == "tags: latest"
    with pytest.raises(NotFoundError):
        resolve(f"{image.layout}@sha256:{'0' * 64}")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("abc:", max_size=5) | st.just(layout.INDEX_TYPE),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "mediaType",
                    "manifests",
                    "digest",
                    "config",
                    "layers",
                    "annotations",
                    "platform",
                    "artifactType",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=json_values, where=st.sampled_from(["index", "manifest"]), ours=st.booleans())
def test_no_document_makes_us_stumble(tmp_path: Path, value: object, where: str, ours: bool) -> None:
    root = tmp_path / "layout"
    shutil.rmtree(root, ignore_errors=True)
    oci = OciLayout(root)
    if where == "index":
        (root / "index.json").write_text(json.dumps(value))
    else:
        if ours and isinstance(value, dict):
            value = {**value, "artifactType": layout.ARTIFACT_TYPE}
            value.setdefault("annotations", {layout.FORMAT_ANNOTATION: layout.FORMAT})
        oci.write_index(oci.json(value, layout.MANIFEST_TYPE))
    with pytest.raises((IntegrityError, NotFoundError)) as caught:
        resolve(str(root))
    assert one_line(caught.value)


# ---- a web server ----


def test_a_web_server_gives_what_its_directory_does(web: Web, image: StoredImage) -> None:
    found = resolve(f"{web.url}/image")
    local = resolve(str(image.layout))
    assert found.manifest_digest == local.manifest_digest
    assert found.chunk_map == local.chunk_map
    assert found.config == local.config
    assert found.blobs[0].endpoints[0].url == f"{web.url}/image/{layout.blob_path(local.blobs[0].digest)}"
    assert all(request.startswith("/image/") for request in web.requests)


@pytest.mark.parametrize("slash", ["", "/"])
def test_tags_and_digests(web: Web, slash: str) -> None:
    digest = digest_of(web.root / "image")
    assert resolve(f"{web.url}/image{slash}").manifest_digest == digest
    assert resolve(f"{web.url}/image:latest").manifest_digest == digest
    assert resolve(f"{web.url}/image@{digest}").manifest_digest == digest
    with pytest.raises(NotFoundError, match="no image v9"):
        resolve(f"{web.url}/image:v9")


def test_names_are_escaped(web: Web) -> None:
    (web.root / "image").rename(web.root / "an image %")
    web.answers["an%20image"] = lambda request, _: request.reply(
        200, (web.root / request.path.replace("%20", " ").replace("%25", "%").lstrip("/")).read_bytes()
    )
    with pytest.raises(UsageError):
        resolve(f"{web.url}/an image")
    assert resolve(f"{web.url}/an%20image%20%25").manifest_digest


@pytest.mark.parametrize("path", ["index.json", "blobs"])
@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (_web.status(404), NotFoundError),
        (_web.status(410), NotFoundError),
        (_web.status(401), PermissionDeniedError),
        (_web.status(403), PermissionDeniedError),
        (_web.status(418), BackendUnavailableError),
        (_web.status(500), BackendUnavailableError),
        (_web.status(503), BackendUnavailableError),
        (_web.status(204), BackendUnavailableError),
        (_web.status(302), BackendUnavailableError),
        (_web.status(302, "/loop/blobs/index.json"), BackendUnavailableError),
        (_web.status(302, "file:///etc/passwd"), UsageError),
        (_web.truncated, BackendUnavailableError),
        (_web.nothing, BackendUnavailableError),
        (_web.hung_up, BackendUnavailableError),
        (_web.body(b"<html>Please log in</html>"), IntegrityError),
        (_web.body(b""), IntegrityError),
        (_web.changed, IntegrityError),
        (_web.endless, IntegrityError),
    ],
)
def test_a_server_that_answers_wrongly(
    web: Web, path: str, answer: _web.Answer, kind: type[BootseerError], tmp_path: Path
) -> None:
    web.answers[path] = answer
    if "loop" not in str(web.answers):
        web.answers["loop"] = answer
    with pytest.raises(kind) as caught:
        resolve(f"{web.url}/image", state_dir=tmp_path / "state")
    assert one_line(caught.value)
    assert not list(tmp_path.glob("state/images/*"))


@pytest.mark.parametrize("which", ["manifest", "config", "chunk map"])
def test_lies_about_a_digest_are_found(web: Web, which: str) -> None:
    name = blob_name(web.root / "image", which)
    web.answers[name] = _web.changed
    with pytest.raises(IntegrityError, match="other bytes"):
        resolve(f"{web.url}/image")


@pytest.mark.parametrize("answer", [_web.status(503), _web.truncated, _web.hung_up, _web.nothing])
@pytest.mark.parametrize("path", ["index.json", "blobs"])
def test_a_passing_failure_is_forgiven(web: Web, path: str, answer: _web.Answer) -> None:
    web.answers[path] = _web.first_fails(answer)
    assert resolve(f"{web.url}/image").manifest_digest


@pytest.mark.parametrize("answer", [_web.silent, _web.dripping], ids=["silent", "dripping"])
@pytest.mark.parametrize("path", ["index.json", "blobs"])
def test_a_server_that_is_too_slow(web: Web, path: str, answer: _web.Answer) -> None:
    web.answers[path] = answer
    with pytest.raises(TimeoutExpiredError, match=r"no answer in 0\.5 s") as caught:
        resolve(f"{web.url}/image", timeout_s=0.5)
    assert one_line(caught.value)


def test_a_port_where_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        with pytest.raises(BackendUnavailableError, match="refused"):
            resolve(f"http://127.0.0.1:{port}/image")


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http:///x",
        "http://[",
        "http://[::1/x",
        "http://h:99999/x",
        "http://h:x/y",
        "http://h/x?y=1/z",
        "http://h/#x/y",
    ],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(url)
    assert one_line(caught.value)


def test_redirects_are_followed(web: Web) -> None:
    for name in ("index.json", "blobs"):
        web.answers[f"/moved/{name}"] = lambda request, _: request.reply(
            302, b"", headers={"Location": request.path.replace("/moved/", "/image/")}
        )
    assert resolve(f"{web.url}/moved").manifest_digest == digest_of(web.root / "image")


def test_credentials_go_to_their_host_only_and_are_never_shown(
    web: Web, image: StoredImage, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(image.layout, tmp_path / "elsewhere/image")
    secret = web.url.replace("http://", "http://user:secret@")
    with served(tmp_path / "elsewhere") as other:
        web.answers["blobs"] = lambda request, _: request.reply(
            302, b"", headers={"Location": other.url + request.path}
        )
        found = resolve(f"{secret}/image")
        assert "Authorization" in web.headers[0]
        assert other.requests
        assert not [headers for headers in other.headers if "Authorization" in headers]
    assert found.manifest_digest == digest_of(web.root / "image")
    web.answers["index.json"] = _web.status(500)
    with pytest.raises(BackendUnavailableError) as caught:
        resolve(f"{secret}/image")
    assert "secret" not in caught.value.message


def test_connections_are_used_again(web: Web) -> None:
    seen = set()
    real = _web.Handler.reply

    def note(request: _web.Handler, status: int, data: bytes, **more: Any) -> None:
        seen.add(request.client_address)
        real(request, status, data, **more)

    web.answers[""] = lambda request, data: note(request, 200, data)
    resolve(f"{web.url}/image")
    assert len(web.requests) == 4
    assert len(seen) == 1


# ---- what is kept ----


def test_what_was_resolved_is_not_asked_for_again(web: Web, tmp_path: Path) -> None:
    reference = f"{web.url}/image@{digest_of(web.root / 'image')}"
    first = resolve(reference, state_dir=tmp_path / "state")
    web.answers[""] = _web.status(500)
    web.requests.clear()
    assert resolve(reference, state_dir=tmp_path / "state") == first
    assert web.requests == []


def test_a_tag_is_asked_for_and_the_rest_is_known(web: Web, tmp_path: Path) -> None:
    resolve(f"{web.url}/image:latest", state_dir=tmp_path / "state")
    web.requests.clear()
    resolve(f"{web.url}/image:latest", state_dir=tmp_path / "state")
    assert web.requests == ["/image/index.json"]


def test_offline(image: StoredImage, tmp_path: Path) -> None:
    (tmp_path / "www").mkdir()
    shutil.copytree(image.layout, tmp_path / "www/image")
    with served(tmp_path / "www") as web:
        reference = f"{web.url}/image@{digest_of(image.layout)}"
        first = resolve(reference, state_dir=tmp_path / "state")
    assert resolve(reference, state_dir=tmp_path / "state") == first
    with pytest.raises(BackendUnavailableError):
        resolve(reference, state_dir=tmp_path / "other state")
    with pytest.raises(BackendUnavailableError):
        resolve(f"{web.url}/image:latest", state_dir=tmp_path / "state")


@pytest.mark.parametrize("name", ["manifest", "config", "chunkmap"])
@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff" * 50, None])
def test_what_was_kept_and_is_damaged_is_asked_for_again(
    web: Web, tmp_path: Path, name: str, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    reference = f"{web.url}/image@{digest_of(web.root / 'image')}"
    state = tmp_path / "state"
    first = resolve(reference, state_dir=state)
    whole = snapshot(state)
    [kept] = (state / "images").iterdir()
    if damage is None:
        (kept / name).unlink()
    else:
        (kept / name).write_bytes(damage)
    with caplog.at_level(logging.ERROR):
        assert resolve(reference, state_dir=state) == first
    assert snapshot(state) == whole  # mended
    web.requests.clear()
    resolve(reference, state_dir=state)
    assert web.requests == []


def test_an_image_starts_when_nothing_can_be_kept(web: Web, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state/images").touch()  # in the way
    assert resolve(f"{web.url}/image", state_dir=tmp_path / "state").manifest_digest


def test_nothing_is_kept_of_what_is_wrong(web: Web, tmp_path: Path) -> None:
    web.answers[blob_name(web.root / "image", "chunk map")] = _web.changed
    with pytest.raises(IntegrityError):
        resolve(f"{web.url}/image", state_dir=tmp_path / "state")
    assert snapshot(tmp_path / "state") == {} if (tmp_path / "state").exists() else True


def test_resolving_at_the_same_time(web: Web, tmp_path: Path) -> None:
    pids = []
    for _ in range(6):
        pid = os.fork()
        if pid == 0:
            try:
                resolve(f"{web.url}/image", state_dir=tmp_path / "state")
            except BaseException:
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 6
    assert len(list((tmp_path / "state/images").iterdir())) == 1
