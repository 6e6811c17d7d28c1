"""From a reference to all that serving the image needs, along the digest chain manifest → config, chunk map.

What was resolved is kept under ``state_dir/images/<manifest digest>/``: a reference that names a digest then needs no
network at all.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from bootseer import native
from bootseer.core.errors import IntegrityError, NotFoundError
from bootseer.core.wire import BlobSource
from bootseer.image import layout
from bootseer.image.http_store import HttpStore
from bootseer.image.reference import Reference, parse

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResolvedImage:
    """``chunk_map`` is verified against the manifest; ``blobs`` hold the chunks, in the order of the map."""

    reference: str
    manifest_digest: str
    chunk_map: bytes
    blobs: list[BlobSource]
    config: dict[str, Any]
    annotations: dict[str, str] = field(default_factory=dict)

    @property
    def cache_key(self) -> str:
        """Names the image in the cache: the digest of its chunk map, in hex."""
        return hashlib.sha256(self.chunk_map).hexdigest()


def resolve(reference: str, *, state_dir: Path | None = None, timeout_s: float = 30.0) -> ResolvedImage:
    """Resolve; blocking, for ``timeout_s`` at most. What is known in ``state_dir`` is not asked for again.

    NotFoundError, IntegrityError, BackendUnavailableError, TimeoutExpiredError, PermissionDeniedError, UsageError.
    """
    parsed = parse(reference)
    with closing(open_store(parsed, timeout_s)) as store:
        found = _load(parsed.digest, state_dir)
        if found is None:
            descriptor = layout.manifest_descriptor(store, parsed.tag, parsed.digest)
            found = _load(descriptor.get("digest"), state_dir) if parsed.digest is None else None
            if found is None:
                found = _fetch(store, descriptor)
                _save(state_dir, parsed, found)
    return ResolvedImage(
        reference=reference,
        manifest_digest=found.digest,
        chunk_map=found.chunk_map,
        blobs=[
            BlobSource(
                digest=found.blob_digest,
                bytes=found.blob_bytes,
                endpoints=store.endpoints(layout.blob_path(found.blob_digest)),
            )
        ],
        config=layout.parse_json(found.config, f"the config of {found.digest}"),
        annotations=found.annotations,
    )


@dataclass(frozen=True)
class _Metadata:
    """The documents of one image, checked against its digest and against each other."""

    manifest: bytes
    config: bytes
    chunk_map: bytes
    digest: str
    blob_digest: str
    blob_bytes: int
    annotations: dict[str, str]

    @classmethod
    def check(cls, manifest: bytes, config: bytes, chunk_map: bytes) -> Self:
        """IntegrityError when the three are not one image that we can serve."""
        digest = layout.digest_of(manifest)
        value = layout.parse_json(manifest, f"manifest {digest}")
        annotations = _check_kind(value, digest)
        map_layer, blob_layer = _layers(value, digest)
        for data, descriptor, what in (
            (config, value.get("config"), "config"),
            (chunk_map, map_layer, "chunk map"),
        ):
            if layout.digest_of(data) != _digest(descriptor, what):
                raise IntegrityError(f"the {what} of {digest} holds other bytes")
        parsed = native.ChunkMap.parse(chunk_map)
        blob_digest = _digest(blob_layer, "chunks")
        if blob_digest != f"sha256:{parsed.blob_sha256.hex()}" or blob_layer.get("size") != parsed.blob_bytes:
            raise IntegrityError(f"the chunk map of {digest} is that of another blob")
        return cls(manifest, config, chunk_map, digest, blob_digest, parsed.blob_bytes, annotations)


def _fetch(store: layout.Store, descriptor: layout.Descriptor) -> _Metadata:
    data, manifest = layout.read_manifest(store, descriptor)
    digest = layout.digest_of(data)
    _check_kind(manifest, digest)
    map_layer, _ = _layers(manifest, digest)
    config = layout.read_blob(store, _digest(manifest.get("config"), "config"), layout.MAX_JSON_BYTES)
    chunk_map = layout.read_blob(store, _digest(map_layer, "chunk map"), layout.MAX_MAP_BYTES)
    return _Metadata.check(data, config, chunk_map)


def open_store(reference: Reference, timeout_s: float) -> layout.Store:
    """Where the layout of a reference is."""
    if reference.is_remote:
        return HttpStore(reference.location, timeout_s)
    root = Path(reference.location)
    if not root.is_dir():
        raise NotFoundError(
            f"{root} is not a directory", hint="an image is an OCI layout directory or an http(s) URL"
        )
    return layout.DirectoryStore(root)


def _digest(descriptor: object, what: str) -> str:
    digest = descriptor.get("digest") if isinstance(descriptor, dict) else None
    if digest is None:
        raise IntegrityError(f"the manifest has no {what}")
    layout.blob_path(digest)
    return str(digest)


def _check_kind(manifest: dict[str, Any], digest: str) -> dict[str, str]:
    """Is it an image of ours, of a format that we know? Returns the annotations."""
    if manifest.get("artifactType") != layout.ARTIFACT_TYPE:
        raise IntegrityError(f"{digest} is no bootseer image", hint="make one with `bootseer image convert`")
    annotations = manifest.get("annotations")
    if not isinstance(annotations, dict):
        annotations = {}
    version = annotations.get(layout.FORMAT_ANNOTATION)
    if version != layout.FORMAT:
        raise IntegrityError(
            f"{digest} has the unknown image format {str(version)[:40]!r}", hint="a newer bootseer made it"
        )
    return {key: value for key, value in annotations.items() if isinstance(value, str)}


def _layers(manifest: dict[str, Any], digest: str) -> tuple[layout.Descriptor, layout.Descriptor]:
    """Chunk map and chunks."""
    layers = layout.descriptors(manifest, "layers", f"manifest {digest}")
    found = []
    for media_type in (layout.CHUNK_MAP_TYPE, layout.CHUNKS_TYPE):
        matching = [layer for layer in layers if layer.get("mediaType") == media_type]
        if len(matching) != 1:
            raise IntegrityError(f"manifest {digest} has {len(matching)} layers of type {media_type}")
        found.append(matching[0])
    return found[0], found[1]


_FILES = ("manifest", "config", "chunkmap")


def _directory(state_dir: Path, digest: str) -> Path:
    return state_dir / "images" / digest.removeprefix("sha256:")


def _load(digest: object, state_dir: Path | None) -> _Metadata | None:
    if state_dir is None or not isinstance(digest, str):
        return None
    layout.blob_path(digest)  # it becomes a part of a path
    directory = _directory(state_dir, digest)
    if not directory.exists():
        return None
    try:
        manifest, config, chunk_map = ((directory / name).read_bytes() for name in _FILES)
        found = _Metadata.check(manifest, config, chunk_map)
        if found.digest == digest:
            return found
        why = "the manifest holds other bytes"
    except IntegrityError as error:
        why = error.message
    except OSError as error:
        why = error.strerror or str(error)
    log.warning("what was kept of %s is damaged (%s), asking for it again", digest, why)
    shutil.rmtree(directory, ignore_errors=True)
    return None


def _save(state_dir: Path | None, reference: Reference, found: _Metadata) -> None:
    """Best effort: an image whose metadata cannot be kept starts all the same."""
    if state_dir is None:
        return
    directory = _directory(state_dir, found.digest)
    contents = zip(_FILES, (found.manifest, found.config, found.chunk_map), strict=True)
    temporary = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=directory.parent, prefix=".tmp-"))
        for name, content in contents:
            (temporary / name).write_bytes(content)
        (temporary / "reference").write_text(str(reference), errors="replace")
        temporary.rename(directory)
    except OSError as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if not directory.exists():  # else somebody was first
            log.warning("metadata of %s is not kept: %s", found.digest, error)
