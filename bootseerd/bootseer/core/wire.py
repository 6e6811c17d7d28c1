"""Records that cross a socket or live in a state file, as JSON.

The daemon's API (HTTP/JSON on a unix socket, paths under ``/v1``) and the worker's protocol (one JSON object
a line on ``worker.sock``) share these records. Unknown fields are ignored when read, so that an old reader
survives a new writer; a change that an old reader cannot survive needs ``/v2``.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from bootseer.core.errors import BootseerError, UsageError

API_VERSION = "v1"
WORKER_PROTOCOL = 1

MountState = Literal["starting", "ready", "restarting", "failed", "unmounted"]


class MountRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/mounts``: serve ``image`` on a FUSE mount point (``None``: one under the run directory)."""

    image: str
    mountpoint: str | None = None
    prefetch: bool = True
    record: bool = True
    background_fill: bool = True
    deadline_s: float = 30.0
    label: str = ""


class Mount(msgspec.Struct, kw_only=True):
    """One mount as the API shows it. ``image_path`` is the EROFS image inside the FUSE mount."""

    id: str
    image: str
    digest: str
    state: MountState
    fuse_mountpoint: str
    image_path: str
    worker_pid: int
    restarts: int
    created_unix_s: float
    config: dict[str, Any]
    trace_path: str
    label: str = ""
    error: str = ""


class Status(msgspec.Struct, kw_only=True):
    """``GET /v1/status``."""

    version: str
    api_version: str
    pid: int
    uptime_s: float
    kernel: str
    spare_ready: bool
    mounts: list[Mount]
    fallbacks: dict[str, int]
    state_dir: str
    run_dir: str


class ErrorBody(msgspec.Struct):
    """What every failed request answers, with the codes of ``bootseer.core.errors``."""

    code: str
    message: str
    hint: str | None = None

    @classmethod
    def of(cls, error: BootseerError) -> ErrorBody:
        """The body that says what ``error`` says."""
        return cls(code=error.code, message=error.message, hint=error.hint)


class Endpoint(msgspec.Struct, kw_only=True):
    """One place that has a blob: an http(s) URL, or the path of a local file.

    ``headers`` are sent with each request and are no secret; with ``auth``, unless empty, the daemon is asked for
    those that are secret and expire. ``ca_file`` (PEM) replaces the system's authorities.
    """

    url: str
    headers: dict[str, str] = {}
    auth: str = ""
    ca_file: str = ""
    skip_verify: bool = False


class BlobSource(msgspec.Struct, kw_only=True):
    """A blob and where it can be had, best place first."""

    digest: str
    bytes: int
    endpoints: list[Endpoint]


class WorkerSpec(msgspec.Struct, kw_only=True):
    """``spec.json`` in a mount's directory: all that a worker needs, resolved. Paths are absolute."""

    mount: Mount
    chunk_map_path: str
    plan_path: str
    blobs: list[BlobSource]
    cache_dir: str
    cache_key: str
    state_dir: str
    prefetch: bool
    record: bool
    background_fill: bool
    deadline_s: float
    ready: bool = False  # the workload was ready before: a successor records no more
    made_mountpoint: bool = False  # the daemon made the directory and removes it after the mount


class WorkerStart(msgspec.Struct):
    """First message to a spare worker; the device descriptor comes with it when a mount is to be resumed."""

    directory: str


class WorkerReady(msgspec.Struct):
    """The worker's first message back; its device descriptor comes with it unless ``error`` is set."""

    pid: int
    protocol: int = WORKER_PROTOCOL
    error: ErrorBody | None = None


WorkerOp = Literal["hello", "statistics", "prefetch", "ready", "unmount", "stop"]


class WorkerCall(msgspec.Struct):
    """A request on ``worker.sock``."""

    op: WorkerOp
    lazy: bool = False


class WorkerReply(msgspec.Struct):
    """Its answer."""

    pid: int
    values: dict[str, Any] = {}
    error: ErrorBody | None = None


T = TypeVar("T")


def encode(record: object) -> bytes:
    """One line of JSON without the line end."""
    return msgspec.json.encode(record)


def decode(data: bytes, kind: type[T]) -> T:
    """Parse and validate; a malformed record is the sender's mistake (UsageError)."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise UsageError(f"malformed {kind.__name__}: {error}") from None
