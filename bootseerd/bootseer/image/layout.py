"""OCI image layouts: reading with every digest checked, writing so that a failure loses nothing.

Source: OCI image specification 1.1, image-layout.md and manifest.md. A layout is read through a *store*, which is a
directory or the same tree over HTTP.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, Self

from bootseer.core.errors import (
    BackendUnavailableError,
    IntegrityError,
    NotFoundError,
    PermissionDeniedError,
    UsageError,
)
from bootseer.core.wire import Endpoint

ARTIFACT_TYPE = "application/vnd.bootseer.image.v1"
CHUNK_MAP_TYPE = "application/vnd.bootseer.chunkmap.v1"
CHUNKS_TYPE = "application/vnd.bootseer.chunks.v1+zstd"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
DOCKER_MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST_TYPE = "application/vnd.docker.distribution.manifest.list.v2+json"
INDEX_TYPES = frozenset({INDEX_TYPE, DOCKER_LIST_TYPE})
MANIFEST_TYPES = frozenset({MANIFEST_TYPE, DOCKER_MANIFEST_TYPE})
REF_NAME = "org.opencontainers.image.ref.name"
FORMAT_ANNOTATION = "dev.bootseer.format"
FORMAT = "1"

MAX_JSON_BYTES = 8 << 20
MAX_MAP_BYTES = 256 << 20
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

Descriptor = dict[str, Any]


class Store(Protocol):
    """Where the files of a layout are."""

    @property
    def name(self) -> str:
        """For messages."""

    def get(self, path: str, max_bytes: int) -> bytes:
        """The content of a file; NotFoundError, IntegrityError (too large), BackendUnavailableError."""

    def endpoints(self, path: str) -> list[Endpoint]:
        """Where a worker reads the file, best place first."""

    def close(self) -> None:
        """End connections that are kept open."""


class DirectoryStore:
    """A layout in a local directory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.name = str(root)

    def get(self, path: str, max_bytes: int) -> bytes:
        """See :class:`Store`."""
        try:
            with (self._root / path).open("rb") as file:
                data = file.read(max_bytes + 1)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(f"{self.name} has no {path}") from None
        except PermissionError:
            raise PermissionDeniedError(f"{self._root / path} may not be read") from None
        except OSError as error:
            raise BackendUnavailableError(f"{self._root / path}: {error.strerror}") from None
        if len(data) > max_bytes:
            raise IntegrityError(f"{self.name}: {path} is larger than {max_bytes} bytes")
        return data

    def endpoints(self, path: str) -> list[Endpoint]:
        """See :class:`Store`."""
        return [Endpoint(url=str((self._root / path).absolute()))]

    def close(self) -> None:
        """Nothing is kept."""


def blob_path(digest: object) -> str:
    """Where a layout keeps the blob with this digest; IntegrityError for what is not a sha256 digest."""
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise IntegrityError(f"{str(digest)[:80]!r} is not a sha256 digest")
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def digest_of(data: bytes) -> str:
    """``sha256:…`` of bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def read_blob(store: Store, digest: object, max_bytes: int) -> bytes:
    """A blob, checked against its digest."""
    data = store.get(blob_path(digest), max_bytes)
    if digest_of(data) != digest:
        raise IntegrityError(f"{store.name}: {digest} holds other bytes ({digest_of(data)})")
    return data


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object; IntegrityError for anything else."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise IntegrityError(f"{what} is not JSON") from None
    if not isinstance(value, dict):
        raise IntegrityError(f"{what} is not a JSON object")
    return value


def descriptors(value: dict[str, Any], key: str, what: str) -> list[Descriptor]:
    """The list of descriptors under ``key``; IntegrityError when it is something else."""
    entries = value.get(key)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise IntegrityError(f"{what} has no list of {key}")
    return entries


def _field(value: dict[str, Any], key: str, name: str) -> str | None:
    """``value[key][name]`` where it is a string; what else a foreign document may hold there counts as nothing."""
    inner = value.get(key)
    text = inner.get(name) if isinstance(inner, dict) else None
    return text if isinstance(text, str) else None


def manifest_descriptor(store: Store, tag: str | None, digest: str | None) -> Descriptor:
    """The manifest that a reference means. ``digest`` wins over ``tag``; without either, the only one, or latest."""
    if digest is not None:
        return {"mediaType": MANIFEST_TYPE, "digest": digest}
    index = parse_json(store.get("index.json", MAX_JSON_BYTES), f"{store.name}/index.json")
    entries = descriptors(index, "manifests", f"{store.name}/index.json")
    if tag is None and len(entries) == 1:
        return entries[0]
    named = {_field(entry, "annotations", REF_NAME): entry for entry in entries}
    found = named.get(tag or "latest")
    if found is None:
        tags = ", ".join(sorted(name for name in named if name)) or "none"
        raise NotFoundError(f"{store.name} has no image {tag or 'latest'}", hint=f"tags: {tags}")
    return found


def host_architecture() -> str:
    """This machine's, by the name that image indexes use (Go's)."""
    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


def read_manifest(
    store: Store, descriptor: Descriptor, architecture: str | None = None
) -> tuple[bytes, dict[str, Any]]:
    """Follow a descriptor (through indexes, by platform) to an image manifest; returns its bytes and content."""
    wanted = architecture or host_architecture()
    for _ in range(4):
        digest = descriptor.get("digest")
        data = read_blob(store, digest, MAX_JSON_BYTES)
        value = parse_json(data, f"manifest {digest}")
        media_type = value.get("mediaType") or descriptor.get("mediaType")
        # The field was optional once.
        is_index = str(media_type) in INDEX_TYPES or ("manifests" in value and "config" not in value)
        if not is_index:
            return data, value
        descriptor = _for_platform(store, descriptors(value, "manifests", f"index {digest}"), wanted)
    raise IntegrityError(f"{store.name}: indexes are nested too deeply")


def _for_platform(store: Store, entries: list[Descriptor], architecture: str) -> Descriptor:
    """The entry for Linux on ``architecture``; one that names no platform counts when no other does."""
    platforms = [
        (_field(entry, "platform", "os"), _field(entry, "platform", "architecture")) for entry in entries
    ]
    for match in (("linux", architecture), (None, architecture), (None, None)):
        if match in platforms:
            return entries[platforms.index(match)]
    known = (
        ", ".join(sorted({f"{os}/{arch}" for os, arch in platforms if os and arch != "unknown"})) or "none"
    )
    raise NotFoundError(f"{store.name} has no image for linux/{architecture}", hint=f"platforms: {known}")


class LayoutWriter:
    """Adds images to a layout directory, which it makes when it is missing.

    Readers need no lock: blobs come first, ``index.json`` last and by rename, and both are on disk before the rename
    is. Several processes may write to one layout. As a context manager it takes back the directory that it made when
    the block fails before the first image is tagged.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._blobs = root / "blobs" / "sha256"
        self._lock_fd: int | None = None
        self._added: list[Path] = []
        marker = root / "oci-layout"
        if root.exists() and not root.is_dir():
            raise UsageError(f"{root} is not a directory")
        self._is_new = not root.exists() or not any(root.iterdir())
        if not self._is_new and not marker.exists():
            raise UsageError(f"{root} is not empty and no OCI layout", hint="give a directory of its own")
        try:
            self._blobs.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UsageError(f"{root} is not a directory") from None
        if self._is_new:
            marker.write_text('{"imageLayoutVersion": "1.0.0"}')
        with self._locked():
            self._remove_stale()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not self._is_new or (self.root / "index.json").exists():
            return
        with suppress(OSError):  # somebody else is about to use it
            self._blobs.rmdir()
            self._blobs.parent.rmdir()
            (self.root / "oci-layout").unlink()
            self.root.rmdir()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Excludes other writers; may be nested."""
        if self._lock_fd is not None:
            yield
            return
        self._lock_fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _remove_stale(self) -> None:
        """Temporary files whose writer was killed: nobody holds their locks."""
        for path in self.root.glob(".tmp-*"):
            with suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()

    @contextmanager
    def temporary(self) -> Iterator[Path]:
        """A path in the layout's file system, gone at the end unless it was adopted."""
        with self._locked():
            fd, name = tempfile.mkstemp(dir=self.root, prefix=".tmp-")
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield Path(name)
        finally:
            os.close(fd)
            Path(name).unlink(missing_ok=True)

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """What is added in the block is there afterwards, or none of it."""
        with self._locked():
            self._added = []
            try:
                yield
            except BaseException:
                for path in self._added:
                    path.unlink(missing_ok=True)
                raise

    def add_bytes(self, media_type: str, data: bytes) -> Descriptor:
        """Store a blob; returns its descriptor."""
        with self.temporary() as path:
            path.write_bytes(data)
            return self.adopt(media_type, path, digest_of(data))

    def adopt(self, media_type: str, path: Path, digest: str) -> Descriptor:
        """Move a file in as a blob whose digest is known."""
        size = path.stat().st_size
        path.chmod(0o644)
        _sync(path)
        target = self.root / blob_path(digest)
        if not target.exists():
            self._added.append(target)
        path.rename(target)
        return {"mediaType": media_type, "digest": digest, "size": size}

    def tag(self, descriptor: Descriptor, tag: str) -> None:
        """Make ``tag`` mean this manifest; other tags stay."""
        path = self.root / "index.json"
        with self._locked():
            index: dict[str, Any] = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": []}
            if path.exists():
                index = parse_json(path.read_bytes(), str(path))
            others = [
                entry
                for entry in descriptors(index, "manifests", str(path))
                if _field(entry, "annotations", REF_NAME) != tag
            ]
            index["manifests"] = [*others, {**descriptor, "annotations": {REF_NAME: tag}}]
            _sync(self._blobs)
            with self.temporary() as temporary:
                temporary.write_text(json.dumps(index, sort_keys=True, indent=1))
                temporary.chmod(0o644)
                _sync(temporary)
                temporary.rename(path)
            _sync(self.root)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
