"""What a node knows of images without asking anybody."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bootseer import native
from bootseer.core.errors import BootseerError
from bootseer.image.traces import TraceStore

_STAT_BLOCK_BYTES = 512  # stat(2), st_blocks


@dataclass(frozen=True)
class KnownImage:
    """An image that was resolved here. ``cached_bytes``: how much of it is on the local disk."""

    digest: str
    reference: str
    image_bytes: int
    blob_bytes: int
    cached_bytes: int
    chunks: int
    recordings: int


def known_images(state_dir: Path) -> list[KnownImage]:
    """All of them, the last resolved first. What cannot be read is left out."""
    traces = TraceStore(state_dir)
    found: list[tuple[int, KnownImage]] = []
    directories = (state_dir / "images").glob("*") if (state_dir / "images").is_dir() else ()
    for directory in directories:
        try:
            when = directory.stat().st_mtime_ns
            chunk_map = native.ChunkMap.load(str(directory / "chunkmap"))
        except (OSError, BootseerError):
            continue
        digest = f"sha256:{directory.name}"
        image = KnownImage(
            digest=digest,
            reference=_read(directory / "reference"),
            image_bytes=chunk_map.image_bytes,
            blob_bytes=chunk_map.blob_bytes,
            cached_bytes=_cached_bytes(state_dir / "cache", chunk_map.digest.hex()),
            chunks=chunk_map.chunk_count,
            recordings=len(traces.paths(digest)),
        )
        found.append((when, image))
    return [image for _, image in sorted(found, key=lambda item: -item[0])]


def summarize(chunk_map: native.ChunkMap) -> dict[str, int | float]:
    """Sizes of an image. ``stored_over_image``: what a full download moves, compared with the image."""
    zeros = shared = 0
    seen: set[int] = set()
    for index in range(chunk_map.chunk_count):
        _, raw_bytes, blob_offset, blob_bytes, _ = chunk_map.chunk(index)
        if blob_bytes == 0:
            zeros += raw_bytes
        elif blob_offset in seen:
            shared += raw_bytes
        seen.add(blob_offset)
    return {
        "image_bytes": chunk_map.image_bytes,
        "meta_bytes": chunk_map.meta_bytes,
        "blob_bytes": chunk_map.blob_bytes,
        "zero_bytes": zeros,
        "shared_bytes": shared,
        "chunks": chunk_map.chunk_count,
        "stored_over_image": round(chunk_map.blob_bytes / max(chunk_map.image_bytes, 1), 4),
    }


def _cached_bytes(cache_dir: Path, key: str) -> int:
    try:
        return (cache_dir / "blobs" / key / "data").stat().st_blocks * _STAT_BLOCK_BYTES
    except OSError:
        return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
