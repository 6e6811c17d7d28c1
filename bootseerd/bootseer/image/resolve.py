"""From a reference to all that serving the image needs, along the digest chain manifest → config, chunk map.

What was resolved is kept under ``state_dir/images/<manifest digest>/``: a reference that names a digest then needs no
network at all.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bootseer.core.errors import IntegrityError, NotFoundError
from bootseer.image import layout
from bootseer.image.reference import Reference, parse


@dataclass(frozen=True)
class ResolvedImage:
    """``chunk_map`` is verified against the manifest; ``blob_uri`` holds the chunks."""

    reference: str
    manifest_digest: str
    chunk_map: bytes
    blob_uri: str
    blob_digest: str
    blob_bytes: int
    config: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)


def resolve(reference: str, *, state_dir: Path | None = None, timeout_s: float = 30.0) -> ResolvedImage:
    """Resolve; blocking. NotFoundError, IntegrityError, BackendUnavailableError, TimeoutExpiredError, UsageError."""
    parsed = parse(reference)
    store = open_store(parsed, timeout_s)
    cached = _load(parsed, state_dir) if parsed.digest else None
    if cached is not None:
        digest, manifest_data, config_data, map_data = cached
        manifest = layout.parse_json(manifest_data, f"manifest {digest}")
        map_layer, blob_layer = _layers(manifest, digest)
    else:
        descriptor = layout.manifest_descriptor(store, parsed.tag, parsed.digest)
        manifest_data, manifest = layout.read_manifest(store, descriptor)
        digest = layout.digest_of(manifest_data)
        map_layer, blob_layer = _layers(manifest, digest)
        config_data = layout.read_blob(
            store, _digest(manifest.get("config"), "config"), layout.MAX_JSON_BYTES
        )
        map_data = layout.read_blob(store, map_layer["digest"], layout.MAX_MAP_BYTES)
        _save(state_dir, digest, manifest_data, config_data, map_data)
    size = blob_layer.get("size")
    return ResolvedImage(
        reference=reference,
        manifest_digest=digest,
        chunk_map=map_data,
        blob_uri=store.uri(layout.blob_path(blob_layer.get("digest"))),
        blob_digest=str(blob_layer["digest"]),
        blob_bytes=size if isinstance(size, int) else 0,
        config=layout.parse_json(config_data, "the image's config"),
        annotations={str(k): str(v) for k, v in (manifest.get("annotations") or {}).items()},
    )


def open_store(reference: Reference, timeout_s: float) -> layout.Store:
    """Where the layout of a reference is."""
    if reference.is_remote:
        return layout.HttpStore(reference.location, timeout_s)
    root = Path(reference.location)
    if not root.is_dir():
        raise NotFoundError(
            f"{root} is not a directory", hint="an image is an OCI layout directory or an http(s) URL"
        )
    return layout.DirectoryStore(root)


def _digest(descriptor: object, what: str) -> str:
    if not isinstance(descriptor, dict):
        raise IntegrityError(f"the manifest has no {what}")
    digest = descriptor.get("digest")
    layout.blob_path(digest)
    return str(digest)


def _layers(manifest: dict[str, Any], digest: str) -> tuple[layout.Descriptor, layout.Descriptor]:
    """Chunk map and chunks of one of our manifests."""
    if manifest.get("artifactType") != layout.ARTIFACT_TYPE:
        raise IntegrityError(f"{digest} is no bootseer image", hint="make one with `bootseer image convert`")
    version = (manifest.get("annotations") or {}).get(layout.FORMAT_ANNOTATION)
    if version != layout.FORMAT:
        raise IntegrityError(
            f"image format {str(version)[:40]!r} is not known", hint="a newer bootseer made it"
        )
    found = {}
    for layer in layout.descriptors(manifest, "layers", f"manifest {digest}"):
        found[layer.get("mediaType")] = layer
        layout.blob_path(layer.get("digest"))
    try:
        return found[layout.CHUNK_MAP_TYPE], found[layout.CHUNKS_TYPE]
    except KeyError as missing:
        raise IntegrityError(f"manifest {digest} has no layer of type {missing.args[0]}") from None


_FILES = ("manifest", "config", "chunkmap")


def _directory(state_dir: Path, digest: str) -> Path:
    return state_dir / "images" / digest.removeprefix("sha256:")


def _load(reference: Reference, state_dir: Path | None) -> tuple[str, bytes, bytes, bytes] | None:
    if state_dir is None or reference.digest is None:
        return None
    directory = _directory(state_dir, reference.digest)
    try:
        manifest, config, chunk_map = ((directory / name).read_bytes() for name in _FILES)
    except OSError:
        return None
    try:
        value = json.loads(manifest)
        whole = (
            layout.digest_of(manifest) == reference.digest
            and layout.digest_of(config) == value["config"]["digest"]
            and layout.digest_of(chunk_map) == _layers(value, reference.digest)[0]["digest"]
        )
    except (ValueError, LookupError, TypeError, IntegrityError):
        whole = False
    return (reference.digest, manifest, config, chunk_map) if whole else None


def _save(state_dir: Path | None, digest: str, *contents: bytes) -> None:
    if state_dir is None:
        return
    directory = _directory(state_dir, digest)
    if directory.exists():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=directory.parent, prefix=".tmp-"))
    for name, content in zip(_FILES, contents, strict=True):
        (temporary / name).write_bytes(content)
    try:
        temporary.rename(directory)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)  # somebody else was first
