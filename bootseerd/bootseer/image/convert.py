"""From a root directory or an OCI image to an image that starts lazily (docs/formats/image.md).

Deterministic: the same input gives the same digests. A failure leaves the destination as it was.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bootseer import native
from bootseer.core.errors import BootseerError, IntegrityError, NotFoundError, UsageError
from bootseer.image import layout
from bootseer.image.reference import check_tag, parse

Progress = Callable[[str, int, int], None]
"""Called with the stage (``reading layers``, ``building``, ``compressing``), the bytes done and the bytes in all."""

MIN_AVERAGE_CHUNK_BYTES, MAX_AVERAGE_CHUNK_BYTES = 16 << 10, 1 << 20
MAX_LEVEL = 19  # above it zstd's windows make reading dear

# OCI image specification 1.1 (layer.md, media-types.md) and what Docker called the same.
_LAYER_TYPE = re.compile(
    r"application/vnd\.(oci\.image\.layer(\.nondistributable)?\.v1\.tar(\+gzip|\+zstd)?"
    r"|docker\.image\.rootfs\.(foreign\.)?diff\.tar(\.gzip|\.zstd)?)"
)


@dataclass(frozen=True)
class ConvertedImage:
    """What was made."""

    digest: str
    image_bytes: int
    meta_bytes: int
    blob_bytes: int
    chunks: int
    files: int


def convert(
    source: Path,
    destination: Path,
    *,
    tag: str = "latest",
    average_chunk_bytes: int = 256 << 10,
    level: int = 3,
    threads: int | None = None,
    progress: Progress | None = None,
) -> ConvertedImage:
    """Convert ``source`` (a root directory, or an OCI layout as ``DIR``, ``DIR:TAG`` or ``DIR@DIGEST``) and add the
    image to the layout ``destination`` under ``tag``.

    ``average_chunk_bytes`` steers the content-defined cuts, ``level`` is zstd's. Needs room for the uncompressed image
    (for layers: twice) and its chunks in ``destination`` meanwhile. UsageError, NotFoundError, IntegrityError,
    PermissionDeniedError; BootseerError when the disk is full; OSError.
    """
    if not MIN_AVERAGE_CHUNK_BYTES <= average_chunk_bytes <= MAX_AVERAGE_CHUNK_BYTES:
        raise UsageError("the average chunk must lie between 16 KiB and 1 MiB")
    if not 1 <= level <= MAX_LEVEL:
        raise UsageError(f"the compression level must lie between 1 and {MAX_LEVEL}")
    check_tag(tag)
    inputs = _read_source(source, destination)
    try:
        with layout.LayoutWriter(destination) as writer, ExitStack() as stack:
            image_path = stack.enter_context(writer.temporary())
            blob_path = stack.enter_context(writer.temporary())
            built = native.build_image(
                layers=inputs.layers,
                directory=inputs.directory,
                output_path=str(image_path),
                spool_dir=str(writer.root),
                progress=progress,
            )
            chunked = native.chunk_image(
                str(image_path),
                str(blob_path),
                meta_bytes=built["meta_bytes"],
                extents=built["extents"],
                average_bytes=average_chunk_bytes,
                level=level,
                threads=threads or os.cpu_count() or 1,
                progress=progress,
            )
            with writer.all_or_nothing():
                digest = _publish(writer, inputs, chunked, blob_path, tag)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise BootseerError(
            f"no space left for the image in {destination}",
            hint="meanwhile there must be room for the uncompressed image (layers: twice) and its chunks",
        ) from None
    return ConvertedImage(
        digest=digest,
        image_bytes=int(built["image_bytes"]),
        meta_bytes=int(built["meta_bytes"]),
        blob_bytes=chunked.blob_bytes,
        chunks=chunked.chunk_count,
        files=int(built["files"]),
    )


def _publish(
    writer: layout.LayoutWriter, inputs: _Inputs, chunked: native.ChunkMap, blob_path: Path, tag: str
) -> str:
    """Add blobs, manifest and tag; returns the manifest's digest."""
    chunk_map = writer.add_bytes(layout.CHUNK_MAP_TYPE, chunked.serialize())
    chunks = writer.adopt(layout.CHUNKS_TYPE, blob_path, "sha256:" + chunked.blob_sha256.hex())
    manifest: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": layout.MANIFEST_TYPE,
        "artifactType": layout.ARTIFACT_TYPE,
        "config": writer.add_bytes(layout.CONFIG_TYPE, inputs.config),
        "layers": [chunk_map, chunks],
        "annotations": {layout.FORMAT_ANNOTATION: layout.FORMAT},
    }
    if inputs.subject is not None:
        manifest["subject"] = inputs.subject
    data = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    descriptor = writer.add_bytes(layout.MANIFEST_TYPE, data)
    writer.tag({**descriptor, "artifactType": layout.ARTIFACT_TYPE}, tag)
    return str(descriptor["digest"])


@dataclass(frozen=True)
class _Inputs:
    directory: str  # a root directory, or empty
    layers: list[str]  # else layer tars in order
    config: bytes
    subject: dict[str, Any] | None


def _read_source(source: Path, destination: Path) -> _Inputs:
    reference = parse(str(source))
    root = Path(reference.location)
    if not root.exists():
        raise NotFoundError(f"{root} does not exist")
    if not root.is_dir():
        raise UsageError(f"{root} is not a directory", hint="a root directory or an OCI layout")
    if (root / "oci-layout").exists():
        return _read_layout(root, layout.DirectoryStore(root), reference.tag, reference.digest)
    if reference.tag or reference.digest:
        raise UsageError(f"{root} is not an OCI layout, so it has no {reference.tag or reference.digest}")
    if destination.resolve().is_relative_to(root.resolve()):
        raise UsageError(f"{destination} lies in {root}: the image would hold itself")
    return _Inputs(str(root), [], _plain_config(), None)


def _read_layout(root: Path, store: layout.Store, tag: str | None, digest: str | None) -> _Inputs:
    data, manifest = layout.read_manifest(store, layout.manifest_descriptor(store, tag, digest))
    digest = layout.digest_of(data)
    if manifest.get("artifactType") == layout.ARTIFACT_TYPE:
        raise UsageError(f"{root}@{digest} is converted already")
    config = manifest.get("config")
    if not isinstance(config, dict):
        raise IntegrityError(f"manifest {digest} has no config")
    config_data = layout.read_blob(store, config.get("digest"), layout.MAX_JSON_BYTES)
    layout.parse_json(config_data, f"config {config.get('digest')}")
    layers = layout.descriptors(manifest, "layers", f"manifest {digest}")
    for layer in layers:
        if not _LAYER_TYPE.fullmatch(str(layer.get("mediaType"))):
            raise UsageError(
                f"{root}@{digest} is no container image: it has a layer of {layer.get('mediaType')}"
            )
    return _Inputs(
        directory="",
        layers=[str(_checked_layer(root, layer.get("digest"))) for layer in layers],
        config=config_data,
        subject={
            "mediaType": manifest.get("mediaType") or layout.MANIFEST_TYPE,
            "digest": digest,
            "size": len(data),
        },
    )


def _checked_layer(root: Path, digest: object) -> Path:
    path = root / layout.blob_path(digest)
    try:
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise NotFoundError(f"{root} lacks the layer {digest}") from None
    if actual != path.name:
        raise IntegrityError(f"{root}: layer {digest} holds other bytes (sha256:{actual})")
    return path


def _plain_config() -> bytes:
    """A minimal image config (OCI image specification 1.1, config.md) for a directory that has none."""
    config = {
        "architecture": layout.host_architecture(),
        "os": "linux",
        "config": {
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "Cmd": ["/bin/sh"],
            "WorkingDir": "/",
        },
        "rootfs": {"type": "layers", "diff_ids": []},
    }
    return json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
