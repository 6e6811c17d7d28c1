"""From a root directory or an OCI image to an image that starts lazily (docs/formats/image.md).

Deterministic: the same input gives the same digests. A failure leaves the destination as it was, apart from blobs
that no manifest mentions.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bootseer import native
from bootseer.core.errors import IntegrityError, NotFoundError, UsageError
from bootseer.image import layout
from bootseer.image.reference import parse

Progress = Callable[[str, int, int], None]

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


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
    """Convert and add the image to the layout ``destination`` under ``tag``."""
    if not 16 << 10 <= average_chunk_bytes <= 1 << 20:
        raise UsageError("the average chunk must lie between 16 KiB and 1 MiB")
    inputs = _read_source(source)
    writer = layout.LayoutWriter(destination)
    with ExitStack() as stack:
        image_path = stack.enter_context(writer.temporary())
        blob = stack.enter_context(writer.temporary())
        built = native.build_image(
            layers=inputs.layers,
            directory=inputs.directory,
            output_path=str(image_path),
            spool_dir=str(writer.root),
            progress=progress,
        )
        chunked = native.chunk_image(
            str(image_path),
            str(blob),
            meta_bytes=built["meta_bytes"],
            extents=built["extents"],
            average_bytes=average_chunk_bytes,
            level=level,
            threads=threads or os.cpu_count() or 1,
            progress=progress,
        )
        config = writer.add_bytes(layout.CONFIG_TYPE, inputs.config)
        chunk_map = writer.add_bytes(layout.CHUNK_MAP_TYPE, chunked.serialize())
        chunks = writer.adopt(layout.CHUNKS_TYPE, blob, "sha256:" + chunked.blob_sha256.hex())
    manifest: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": layout.MANIFEST_TYPE,
        "artifactType": layout.ARTIFACT_TYPE,
        "config": config,
        "layers": [chunk_map, chunks],
        "annotations": {layout.FORMAT_ANNOTATION: layout.FORMAT},
    }
    if inputs.subject is not None:
        manifest["subject"] = inputs.subject
    data = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    descriptor = writer.add_bytes(layout.MANIFEST_TYPE, data)
    descriptor["artifactType"] = layout.ARTIFACT_TYPE
    writer.tag(descriptor, tag)
    return ConvertedImage(
        digest=str(descriptor["digest"]),
        image_bytes=int(built["image_bytes"]),
        meta_bytes=int(built["meta_bytes"]),
        blob_bytes=chunked.blob_bytes,
        chunks=chunked.chunk_count,
        files=int(built["files"]),
    )


@dataclass(frozen=True)
class _Inputs:
    directory: str  # a root directory, or empty
    layers: list[str]  # else layer tars in order
    config: bytes
    subject: dict[str, Any] | None


def _read_source(source: Path) -> _Inputs:
    reference = parse(str(source))
    root = Path(reference.location)
    if not root.exists():
        raise NotFoundError(f"{root} does not exist")
    if not root.is_dir():
        raise UsageError(f"{root} is not a directory", hint="a root directory or an OCI layout")
    if not (root / "oci-layout").exists():
        if reference.tag or reference.digest:
            raise UsageError(f"{root} is not an OCI layout, so it has no {reference.tag or reference.digest}")
        return _Inputs(str(root), [], _plain_config(), None)
    store = layout.DirectoryStore(root)
    descriptor = layout.manifest_descriptor(store, reference.tag, reference.digest)
    data, manifest = layout.read_manifest(store, descriptor)
    if manifest.get("artifactType") == layout.ARTIFACT_TYPE:
        raise UsageError(f"{source} is converted already")
    digest = layout.digest_of(data)
    config_descriptor = manifest.get("config")
    if not isinstance(config_descriptor, dict):
        raise IntegrityError(f"manifest {digest} has no config")
    config = layout.read_blob(store, config_descriptor.get("digest"), layout.MAX_JSON_BYTES)
    paths = [
        str(root / layout.blob_path(layer.get("digest")))
        for layer in layout.descriptors(manifest, "layers", f"manifest {digest}")
    ]
    for path in paths:
        if not Path(path).exists():
            raise NotFoundError(f"{source} lacks the layer {Path(path).name}")
        _check_layer(Path(path))
    media_type = manifest.get("mediaType") or layout.MANIFEST_TYPE
    return _Inputs("", paths, config, {"mediaType": media_type, "digest": digest, "size": len(data)})


def _check_layer(path: Path) -> None:
    import hashlib

    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != path.name:
        raise IntegrityError(f"layer sha256:{path.name} holds other bytes (sha256:{digest})")


def _plain_config() -> bytes:
    """A minimal image config (OCI image specification 1.1, config.md) for a directory that has none."""
    machine = platform.machine()
    config = {
        "architecture": _ARCHITECTURES.get(machine, machine),
        "os": "linux",
        "config": {
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "Cmd": ["/bin/sh"],
            "WorkingDir": "/",
        },
        "rootfs": {"type": "layers", "diff_ids": []},
    }
    return json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
