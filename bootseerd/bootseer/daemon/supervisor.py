"""Mounts and the workers that serve them.

Invariants: each live mount has a duplicate of its device descriptor in this process, so that a worker that dies can
be replaced; ``spec.json`` exists from before the mount until after its end, so that the next daemon can adopt it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import platform
import secrets
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from bootseer import native
from bootseer.core import errors, wire
from bootseer.daemon.workers import Spare, call
from bootseer.image.resolve import resolve
from bootseer.image.traces import TraceStore

log = logging.getLogger(__name__)

# A worker that dies this often without ever serving for a while is not going to live.
_MAX_QUICK_DEATHS = 5
_QUICK_DEATH_S = 1.0
_MOUNT_DETACH = 2  # MNT_DETACH of umount2(2)


@dataclass
class _Entry:
    spec: wire.WorkerSpec
    directory: Path
    device_fd: int
    changed: trio.Event = field(default_factory=trio.Event)


class Supervisor:
    """All mounts of a node. Use :meth:`run` in a nursery; the other methods serve the API."""

    def __init__(self, run_dir: Path, state_dir: Path, version: str) -> None:
        self.run_dir = run_dir
        self.state_dir = state_dir
        self._version = version
        self._mounts_dir = run_dir / "mounts"
        self._mounts_dir.mkdir(parents=True, exist_ok=True)
        for name in ("cache", "images", "traces"):
            (state_dir / name).mkdir(parents=True, exist_ok=True)
        self._entries: dict[str, _Entry] = {}
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._traces = TraceStore(state_dir)
        self._spare: Spare | None = None
        self._started = time.monotonic()
        self._nursery: trio.Nursery | None = None

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Adopt what a predecessor left, then watch workers until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._prepare_spare()
            for directory in sorted(self._mounts_dir.iterdir()):
                await self._adopt(directory)
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                if self._spare is not None:
                    self._spare.discard()

    # -- the API's verbs --------------------------------------------------------------------------------------------

    def status(self) -> wire.Status:
        """The whole node."""
        return wire.Status(
            version=self._version,
            api_version=wire.API_VERSION,
            pid=os.getpid(),
            uptime_s=round(time.monotonic() - self._started, 3),
            kernel=platform.release(),
            spare_ready=self._spare is not None and self._spare.alive,
            mounts=self.mounts(),
            fallbacks={},
            state_dir=str(self.state_dir),
            run_dir=str(self.run_dir),
        )

    def mounts(self) -> list[wire.Mount]:
        """All mounts, oldest first."""
        return [entry.spec.mount for entry in self._entries.values()]

    def get(self, mount_id: str) -> wire.Mount:
        """One mount."""
        return self._entry(mount_id).spec.mount

    async def mount(self, request: wire.MountRequest) -> wire.Mount:
        """Resolve the image, start a worker on it."""
        image = await trio.to_thread.run_sync(lambda: resolve(request.image, state_dir=self.state_dir))
        mount_id = secrets.token_hex(6)
        directory = self._mounts_dir / mount_id
        fuse_mountpoint = Path(request.mountpoint) if request.mountpoint else directory / "fuse"
        if not fuse_mountpoint.is_absolute():
            raise errors.UsageError(f"mount point {fuse_mountpoint} is not absolute")
        (directory / "state").mkdir(parents=True)
        try:
            fuse_mountpoint.mkdir(parents=True, exist_ok=True)
            spec = self._make_spec(request, mount_id, directory, fuse_mountpoint, image)
            self._store(directory, spec)
            pid, device_fd = await self._start_worker(directory, None)
        except BaseException as error:
            shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, OSError):
                raise errors.UsageError(f"cannot mount on {fuse_mountpoint}: {error.strerror}") from None
            raise
        entry = _Entry(spec, directory, device_fd)
        self._entries[mount_id] = entry
        self._set(entry, state="ready", worker_pid=pid)
        self._watch(entry, pid)
        return spec.mount

    async def unmount(self, mount_id: str, *, lazy: bool) -> wire.Mount:
        """End a mount; UsageError when it is busy."""
        entry = self._entry(mount_id)
        previous = entry.spec.mount.state
        if previous == "failed":
            self._forget(entry)
            return entry.spec.mount
        self._set(entry, state="unmounted")
        try:
            await call(entry.directory, "unmount", lazy=lazy)
        except errors.BootseerError as error:
            self._set(entry, state=previous)
            if error.code == "busy" or "busy" in error.message.lower():
                raise errors.UsageError(
                    f"mount {mount_id} is busy", hint="end its users, or unmount lazily"
                ) from None
            raise
        self._forget(entry)
        return entry.spec.mount

    async def statistics(self, mount_id: str) -> dict[str, Any]:
        """Counters of the worker; they start anew with each worker."""
        reply, _ = await call(self._entry(mount_id).directory, "statistics")
        return reply.values

    async def tell(self, mount_id: str, op: wire.WorkerOp) -> wire.Mount:
        """``ready`` or ``prefetch``."""
        entry = self._entry(mount_id)
        await call(entry.directory, op)
        return entry.spec.mount

    # -- workers ----------------------------------------------------------------------------------------------------

    def _make_spec(
        self, request: wire.MountRequest, mount_id: str, directory: Path, fuse_mountpoint: Path, image: Any
    ) -> wire.WorkerSpec:
        map_path = directory / "chunkmap"
        map_path.write_bytes(image.chunk_map)
        plan_path = directory / "plan.json"
        chunk_map = native.ChunkMap.parse(image.chunk_map)
        plan = self._traces.plan(image.manifest_digest, chunk_map) if request.prefetch else []
        plan_path.write_text(json.dumps(plan))
        mount = wire.Mount(
            id=mount_id,
            image=request.image,
            digest=image.manifest_digest,
            state="starting",
            fuse_mountpoint=str(fuse_mountpoint),
            image_path=str(fuse_mountpoint / "image.erofs"),
            worker_pid=0,
            restarts=0,
            created_unix_s=time.time(),
            config=image.config,
            trace_path=str(self._traces.recording_path(image.manifest_digest, mount_id))
            if request.record
            else "",
            label=request.label,
        )
        return wire.WorkerSpec(
            mount=mount,
            chunk_map_path=str(map_path),
            plan_path=str(plan_path),
            blob_uri=image.blob_uri,
            headers=image.headers,
            cache_dir=str(self.state_dir / "cache"),
            cache_key=image.blob_digest.removeprefix("sha256:"),
            state_dir=str(directory / "state"),
            prefetch=request.prefetch,
            record=request.record,
            background_fill=request.background_fill,
            deadline_s=request.deadline_s,
        )

    def _prepare_spare(self) -> None:
        self._spare = Spare(self.run_dir / "worker.log")

    async def _start_worker(self, directory: Path, device_fd: int | None) -> tuple[int, int]:
        spare = (
            self._spare
            if self._spare is not None and self._spare.alive
            else Spare(self.run_dir / "worker.log")
        )
        self._spare = None
        try:
            pid, fd = await spare.start(directory, device_fd)
        finally:
            # After the start, so that the next interpreter does not compete with this one for a core.
            assert self._nursery is not None
            self._nursery.start_soon(self._prepare_spare_later)
        self._children[pid] = spare.process
        return pid, fd

    async def _prepare_spare_later(self) -> None:
        await trio.sleep(3)
        if self._spare is None:
            self._prepare_spare()

    def _watch(self, entry: _Entry, pid: int) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(self._watch_worker, entry, pid)

    async def _watch_worker(self, entry: _Entry, pid: int) -> None:
        quick_deaths = 0
        while True:
            started = trio.current_time()
            await _wait_death(pid)
            if child := self._children.pop(pid, None):
                child.wait()
            if entry.spec.mount.state == "unmounted" or entry.spec.mount.id not in self._entries:
                return
            if _is_unmounted(entry.device_fd):
                log.info("mount %s was unmounted from outside", entry.spec.mount.id)
                self._set(entry, state="unmounted")
                self._forget(entry)
                return
            quick_deaths = quick_deaths + 1 if trio.current_time() - started < _QUICK_DEATH_S else 0
            log.warning("worker %d of mount %s died; resuming", pid, entry.spec.mount.id)
            self._set(entry, state="restarting", restarts=entry.spec.mount.restarts + 1)
            restarted = await self._restart(entry, quick_deaths)
            if restarted is None:
                return
            pid = restarted

    async def _restart(self, entry: _Entry, quick_deaths: int) -> int | None:
        for attempt in range(quick_deaths, _MAX_QUICK_DEATHS * 10):
            await trio.sleep(0.05 * max(0, attempt - 1))
            try:
                pid, fd = await self._start_worker(entry.directory, entry.device_fd)
            except errors.BootseerError as error:
                log.error("mount %s: %s", entry.spec.mount.id, error)
                if attempt >= _MAX_QUICK_DEATHS + quick_deaths:
                    self._give_up(entry, str(error))
                    return None
                continue
            os.close(fd)  # a duplicate of the one that we hold
            self._set(entry, state="ready", worker_pid=pid)
            return pid
        return None

    def _give_up(self, entry: _Entry, why: str) -> None:
        """Readers get errors instead of waiting for a worker that will not come."""
        self._set(entry, state="failed", error=why)
        os.close(entry.device_fd)
        entry.device_fd = -1
        _detach(entry.spec.mount.fuse_mountpoint)

    async def _adopt(self, directory: Path) -> None:
        try:
            spec = wire.decode((directory / "spec.json").read_bytes(), wire.WorkerSpec)
        except (OSError, errors.UsageError) as error:
            log.warning("%s is not a mount: %s", directory, error)
            shutil.rmtree(directory, ignore_errors=True)
            return
        try:
            reply, fd = await call(directory, "hello")
        except errors.BootseerError as error:
            # Its descriptor died with it and with our predecessor: the mount cannot be saved, only be cleaned up.
            log.warning("mount %s was lost: %s", spec.mount.id, error)
            _detach(spec.mount.fuse_mountpoint)
            shutil.rmtree(directory, ignore_errors=True)
            return
        assert fd is not None
        entry = _Entry(spec, directory, fd)
        self._entries[spec.mount.id] = entry
        self._set(entry, state="ready", worker_pid=reply.pid)
        self._watch(entry, reply.pid)
        log.info("adopted mount %s (worker %d)", spec.mount.id, reply.pid)

    # -- records ----------------------------------------------------------------------------------------------------

    def _entry(self, mount_id: str) -> _Entry:
        entry = self._entries.get(mount_id)
        if entry is None:
            raise errors.NotFoundError(f"there is no mount {mount_id}")
        return entry

    def _set(self, entry: _Entry, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(entry.spec.mount, name, value)
        self._store(entry.directory, entry.spec)

    @staticmethod
    def _store(directory: Path, spec: wire.WorkerSpec) -> None:
        temporary = directory / "spec.json.tmp"
        temporary.write_bytes(wire.encode(spec))
        temporary.replace(directory / "spec.json")

    def _forget(self, entry: _Entry) -> None:
        self._entries.pop(entry.spec.mount.id, None)
        if entry.device_fd >= 0:
            os.close(entry.device_fd)
        shutil.rmtree(entry.directory, ignore_errors=True)


async def _wait_death(pid: int) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        await trio.lowlevel.wait_readable(fd)
    finally:
        os.close(fd)


def _is_unmounted(device_fd: int) -> bool:
    """Whether the kernel has ended the connection: it then refuses even an empty write with ENODEV."""
    try:
        os.write(device_fd, b"")
    except OSError as error:
        return error.errno == errno.ENODEV
    return False


def _detach(mountpoint: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.umount2(os.fsencode(mountpoint), _MOUNT_DETACH)
