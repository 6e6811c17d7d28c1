"""OCI layouts as other tools make them, sound and broken; and what an image of ours holds."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from bootseer import native
from bootseer.fusefs.blobs import open_blobs
from bootseer.image import layout
from bootseer.image.resolve import ResolvedImage, resolve

LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"

Descriptor = dict[str, Any]


class OciLayout:
    """A layout in the making. Nothing is checked: every kind of nonsense can be written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.blobs = root / "blobs/sha256"
        self.blobs.mkdir(parents=True)
        (root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def blob(self, data: bytes, media_type: str) -> Descriptor:
        digest = hashlib.sha256(data).hexdigest()
        (self.blobs / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    def json(self, value: object, media_type: str) -> Descriptor:
        return self.blob(json.dumps(value).encode(), media_type)

    def image(
        self,
        *layers: bytes,
        config: object = None,
        manifest_type: str = layout.MANIFEST_TYPE,
        layer_type: str = LAYER_TYPE,
        **fields: Any,
    ) -> Descriptor:
        """A manifest with these layers; its descriptor."""
        manifest = {
            "schemaVersion": 2,
            "mediaType": manifest_type,
            "config": self.json(config or {"config": {"Cmd": ["/bin/sh"]}}, layout.CONFIG_TYPE),
            "layers": [self.blob(layer, layer_type) for layer in layers],
            **fields,
        }
        return self.json(manifest, manifest_type)

    def write_index(self, *entries: object, **fields: Any) -> Path:
        """``index.json`` with these descriptors; returns the layout."""
        index = {"schemaVersion": 2, "manifests": list(entries), **fields}
        (self.root / "index.json").write_text(json.dumps(index))
        return self.root


def tagged(descriptor: Descriptor, tag: str) -> Descriptor:
    return {**descriptor, "annotations": {layout.REF_NAME: tag}}


def blob_file(image: ResolvedImage) -> Path:
    """The file that holds all chunks of an image in a local layout."""
    (blob,) = image.blobs
    return Path(blob.endpoints[0].url)


def unpack(reference: str, scratch: Path) -> Path:
    """The EROFS image behind one of our references, decoded and verified chunk by chunk."""
    image = resolve(reference)
    chunk_map = native.ChunkMap.parse(image.chunk_map)
    cache = native.Cache(str(scratch / "cache"))
    file = native.BlockFile(
        cache,
        image.cache_key,
        chunk_map,
        open_blobs(image.blobs),
        background_fill=False,
        record=False,
    )
    path = scratch / "unpacked"
    try:
        with path.open("wb") as out:
            for offset in range(0, file.size_bytes, 1 << 20):
                out.write(file.pread(offset, 1 << 20))
    finally:
        file.close()
        cache.close()
    return path


def snapshot(directory: Path) -> dict[str, bytes]:
    """Every file of a directory: what a failure must leave alone."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
