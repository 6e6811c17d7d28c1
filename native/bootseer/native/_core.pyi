"""Types of the compiled extension; the bindings are in native/bindings."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, final

from typing_extensions import Buffer

class ReadFile:
    """A read-only file that a Session can serve. Abstract."""

    @property
    def size_bytes(self) -> int: ...

@final
class ChunkMap:
    """Which bytes of a blob make which bytes of an image (docs/formats/chunk-map.md). Immutable and valid."""

    def __init__(
        self,
        image_bytes: int,
        meta_bytes: int,
        blob_bytes: int,
        blob_sha256: bytes,
        entries: Sequence[tuple[int, int, int, int, bytes]],
    ) -> None:
        """``entries``: (raw_offset, raw_bytes, blob_offset, blob_bytes, sha256), as ``chunk()`` returns them.

        Raises IntegrityError when a rule of the format is broken.
        """
    @staticmethod
    def parse(data: Buffer) -> ChunkMap: ...
    @staticmethod
    def load(path: str) -> ChunkMap: ...
    def serialize(self) -> bytes: ...
    def chunk(self, index: int) -> tuple[int, int, int, int, bytes]:
        """(raw_offset, raw_bytes, blob_offset, blob_bytes, sha256 of the raw bytes)."""
    def index_of(self, raw_offset: int) -> int:
        """The chunk that holds that byte of the image."""
    @property
    def image_bytes(self) -> int: ...
    @property
    def meta_bytes(self) -> int: ...
    @property
    def blob_bytes(self) -> int: ...
    @property
    def chunk_count(self) -> int: ...
    @property
    def blob_sha256(self) -> bytes: ...
    @property
    def digest(self) -> bytes:
        """sha256 of ``serialize()``."""

@final
class Trace:
    """First-use records of a start (docs/formats/trace.md)."""

    @staticmethod
    def parse(data: Buffer) -> Trace:
        """Drops what follows the first damaged record; IntegrityError when there is no valid header."""
    @staticmethod
    def load(path: str) -> Trace: ...
    @staticmethod
    def merge(traces: Sequence[Trace]) -> Trace:
        """The union by time; a range that occurs in several keeps its earliest time."""
    def serialize(self) -> bytes: ...
    def records(self) -> list[tuple[int, int, int, int]]:
        """(offset, length, pid, t_ns since the start of the recording), as recorded."""
    def plan(self, map: ChunkMap) -> list[tuple[int, int]]:
        """(chunk, t_ns) of each chunk's first use, earliest first."""
    @property
    def dropped(self) -> int: ...
    @property
    def image_bytes(self) -> int: ...
    @property
    def started_unix_ns(self) -> int: ...
    @property
    def is_finished(self) -> bool:
        """The workload said that it was ready."""

@final
class Source:
    """Byte ranges of one blob. Made by ``open_source``."""

    def read(self, offset: int, length: int) -> bytes:
        """Blocks. Raises BackendUnavailableError, NotFoundError or TimeoutExpiredError."""
    def __str__(self) -> str:
        """The address without user and query string."""

def open_source(
    uri: str,
    *,
    headers: Mapping[str, str] | None = None,
    connect_timeout_s: float = 10.0,
    request_timeout_s: float = 60.0,
    retries: int = 5,
    max_connections: int = 8,
    ca_file: str | None = None,
) -> Source:
    """``http://``, ``https://``, ``file://`` or a path. ``connect_timeout_s`` is also the longest silence.

    ``ca_file``: PEM file of the authorities to trust instead of the system's.
    """

@final
class Cache:
    """A cache directory, shared by all processes of a node (docs/formats/cache.md)."""

    def __init__(self, directory: str, *, sync_interval_s: float = 5.0) -> None: ...
    def usage_bytes(self) -> int: ...
    def close(self) -> None: ...
    @property
    def directory(self) -> str: ...

@final
class BlockFile(ReadFile):
    """A file made of chunks that live somewhere else, cached and verified."""

    def __init__(
        self,
        cache: Cache,
        key: str,
        map: ChunkMap,
        source: Source,
        *,
        trace_path: str | None = None,
        deadline_s: float = 30.0,
        background_fill: bool = True,
        record: bool = True,
        background_idle_s: float = 3.0,
    ) -> None:
        """``key``: 64 hex digits that name the blob in the cache.

        ``deadline_s`` bounds a read that waits for the origin. ``background_idle_s``: how long no read may
        have waited before the rest of the blob is filled.
        """
    def prefetch(self, plan: Sequence[tuple[int, int]]) -> None:
        """Fetch (chunk, t_ns) in this order, ahead of use. Replaces what is left of an earlier plan."""
    def pread(self, offset: int, length: int) -> bytes:
        """Blocks. IntegrityError, BackendUnavailableError, NotFoundError or TimeoutExpiredError."""
    def is_complete(self) -> bool: ...
    def local_path(self) -> str: ...
    def ready_bytes(self) -> int: ...
    def statistics(self) -> dict[str, Any]: ...
    def mark_ready(self) -> None:
        """The workload is ready: recording ends, the rest of the blob may be filled."""
    def close(self) -> None: ...

class LocalFile(ReadFile):
    """A complete local regular file; ``passthrough`` offers it to the kernel (FUSE passthrough)."""

    def __init__(self, path: str, *, passthrough: bool = False) -> None: ...

class Session:
    """Answers FUSE READs in C++; pyfuse3, given ``/dev/fd/{control_fd}``, gets everything else."""

    @staticmethod
    def mount(
        mountpoint: str,
        *,
        state_dir: str | None = None,
        threads: int = 4,
        max_read_bytes: int = 1048576,
        max_background: int = 64,
        read_ahead_bytes: int = 1048576,
        passthrough: bool = True,
        allow_other: bool = True,
        read_only: bool = True,
        fsname: str = "bootseer",
        subtype: str = "bootseer",
        journal: Literal["auto", "always", "never"] = "auto",
    ) -> Session: ...
    @staticmethod
    def resume(
        device_fd: int,
        *,
        mountpoint: str,
        state_dir: str,
        threads: int = 4,
        max_read_bytes: int = 1048576,
        max_background: int = 64,
        read_ahead_bytes: int = 1048576,
        passthrough: bool = True,
        allow_other: bool = True,
        read_only: bool = True,
        fsname: str = "bootseer",
        subtype: str = "bootseer",
        journal: Literal["auto", "always", "never"] = "auto",
    ) -> Session:
        """Go on with a mount whose process died; duplicates ``device_fd``.

        Takes what ``mount`` takes; options that only mount(2) can set are ignored. Raises ``NotFoundError`` when
        ``state_dir`` does not exist, ``IntegrityError`` when its record is damaged.
        """
    @property
    def control_fd(self) -> int:
        """Hands the descriptor over: pyfuse3 closes it in ``pyfuse3.close()``."""
    @property
    def device_fd(self) -> int: ...
    @property
    def ended_fd(self) -> int:
        """Readable once the kernel has ended the session (unmounted or aborted)."""
    @property
    def ended(self) -> bool: ...
    def add_file(self, inode: int, read_file: ReadFile) -> None: ...
    def remove_file(self, inode: int) -> None: ...
    def start(self) -> None:
        """Start serving. After ``resume`` the files must have been added before, so that their reads find them."""
    def stop(self) -> None:
        """Stop serving and leave the mount; readers wait for a successor."""
    def unmount(self, *, lazy: bool = False) -> None: ...
    def info(self) -> dict[str, Any]:
        """Negotiated values as the kernel uses them, and ``fallbacks``: capability → why it is not used."""
    def statistics(self) -> dict[str, int]: ...

class _SlowFile(ReadFile):
    """Tests only: answers late."""

    def __init__(self, inner: ReadFile, delay_s: float) -> None: ...

def _read_loop(
    path: str, *, direct: bool, random: bool, block_bytes: int, duration_s: float, seed: int
) -> tuple[int, int, float]:
    """Benches only: reads as fast as it can; returns (reads, bytes, seconds)."""

def build_image(
    *,
    layers: Sequence[str] = (),
    directory: str = "",
    output_path: str,
    spool_dir: str,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """An EROFS image from a root directory or from layer tars in order.

    Returns image_bytes, meta_bytes, files and extents (offsets at which files start). ``progress`` gets the stage,
    the bytes done and the bytes in all. OSError, UsageError, IntegrityError.
    """

def chunk_image(
    image_path: str,
    blob_path: str,
    *,
    meta_bytes: int,
    extents: Sequence[int],
    average_bytes: int,
    level: int,
    threads: int,
    progress: Callable[[str, int, int], None] | None = None,
) -> ChunkMap:
    """Cut an image into chunks, write them to ``blob_path``, return the map."""

def mount_erofs(image_path: str, target: str, *, by: Literal["any", "file", "loop"] = "any") -> str:
    """Mount an EROFS image file read-only; returns ``file+directio``, ``file`` or ``loop:/dev/loopN``.

    ``by`` is ``loop`` where another overlay must fit on top of the first. OSError, IntegrityError (no EROFS image).
    """

def mount_overlay(lower: Sequence[str], upper: str, work: str, target: str) -> None:
    """Stack ``upper`` on ``lower`` (top first) at ``target``. OSError, UsageError."""

def mount_bind(source: str, target: str, *, recursive: bool = True, read_only: bool = False) -> None:
    """Show ``source`` at ``target``, too. OSError."""

def umount(target: str, *, lazy: bool = False) -> None:
    """Unmount what lies topmost at ``target``; symbolic links are not followed. OSError."""

def spawn_namespaced(
    root: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    *,
    binds: Sequence[tuple[str, str, bool]] = (),
    hostname: str = "",
    uid: int = 0,
    gid: int = 0,
    groups: Sequence[int] = (),
) -> int:
    """Start a command in namespaces and a root of its own.

    Returns the pid of the namespace's init, a child of this process that exits with the command's code (128 + number
    after a signal) and passes SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 on. It is killed when the *thread*
    that called ends.
    ``binds``: (source, target, read only); a missing target or ``cwd`` is made. OSError when the command cannot be
    executed or ``cwd`` not be entered; UsageError that names the step when the root cannot be set up.
    """
