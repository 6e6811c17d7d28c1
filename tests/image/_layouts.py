"""OCI layouts as other tools write them."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OCI = {
    "manifest": "application/vnd.oci.image.manifest.v1+json",
    "index": "application/vnd.oci.image.index.v1+json",
    "config": "application/vnd.oci.image.config.v1+json",
    "layer": "application/vnd.oci.image.layer.v1.tar",
    "layer+gzip": "application/vnd.oci.image.layer.v1.tar+gzip",
    "layer+zstd": "application/vnd.oci.image.layer.v1.tar+zstd",
}
DOCKER = {
    "manifest": "application/vnd.docker.distribution.manifest.v2+json",
    "index": "application/vnd.docker.distribution.manifest.list.v2+json",
    "config": "application/vnd.docker.container.image.v1+json",
    "layer": "application/vnd.docker.image.rootfs.diff.tar",
    "layer+gzip": "application/vnd.docker.image.rootfs.diff.tar.gzip",
}
CONFIG = {"architecture": "amd64", "os": "linux", "config": {"Cmd": ["/bin/true"], "Env": ["A=b"]}}

Descriptor = dict[str, Any]


def put(root: Path, media_type: str, data: bytes | dict[str, Any]) -> Descriptor:
    """Store a blob; documents as JSON."""
    content = data if isinstance(data, bytes) else json.dumps(data).encode()
    digest = hashlib.sha256(content).hexdigest()
    path = root / "blobs/sha256" / digest
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}


def put_manifest(
    root: Path,
    layers: Sequence[bytes],
    *,
    types: dict[str, str] = OCI,
    kind: str = "layer+gzip",
    config: dict[str, Any] | None = None,
) -> Descriptor:
    """Store an image of plain tars, compressed as ``kind`` says."""
    packed = [gzip.compress(layer, 1, mtime=0) if kind == "layer+gzip" else layer for layer in layers]
    manifest = {
        "schemaVersion": 2,
        "mediaType": types["manifest"],
        "config": put(root, types["config"], config or CONFIG),
        "layers": [put(root, types[kind], layer) for layer in packed],
    }
    return put(root, types["manifest"], manifest)


def finish(root: Path, entries: Sequence[Descriptor]) -> Path:
    """Write what makes a directory a layout."""
    (root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    index = {"schemaVersion": 2, "manifests": list(entries)}
    (root / "index.json").write_text(json.dumps(index))
    return root


def tagged(descriptor: Descriptor, tag: str) -> Descriptor:
    """An entry of ``index.json``."""
    return {**descriptor, "annotations": {"org.opencontainers.image.ref.name": tag}}


def for_platform(descriptor: Descriptor, platform: str) -> Descriptor:
    """An entry of an index for ``os/architecture``."""
    os_name, _, architecture = platform.partition("/")
    return {**descriptor, "platform": {"os": os_name, "architecture": architecture}}


def contents(root: Path) -> dict[str, bytes]:
    """All files below a directory."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
