"""The C++ data plane. Importing this needs the compiled extension."""

from bootseer.native._core import (
    BlockFile,
    Cache,
    ChunkMap,
    LocalFile,
    ReadFile,
    Session,
    Source,
    Trace,
    build_image,
    chunk_image,
    mount_bind,
    mount_erofs,
    mount_overlay,
    open_source,
    spawn_namespaced,
    umount,
)

__all__ = [
    "BlockFile",
    "Cache",
    "ChunkMap",
    "LocalFile",
    "ReadFile",
    "Session",
    "Source",
    "Trace",
    "build_image",
    "chunk_image",
    "mount_bind",
    "mount_erofs",
    "mount_overlay",
    "open_source",
    "spawn_namespaced",
    "umount",
]
