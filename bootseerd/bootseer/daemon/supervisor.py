"""Mounts and the workers that serve them.

Invariants: each live mount has a duplicate of its device descriptor in this process, so that a worker that
dies can be replaced; ``spec.json`` exists from before the mount until after its end, so that the next daemon
can adopt it. Whoever changes which worker serves a mount, or ends the mount, holds the entry's lock.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import secrets
import select
import shutil
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from bootseer import native
from bootseer.core import errors, wire
from bootseer.daemon.mountpoint import Mountpoint
from bootseer.daemon.workers import (
    MAX_SOCKET_PATH_BYTES,
    SOCKET_NAME,
    Spare,
    WorkerDeadError,
    call,
    owner_pid,
)
from bootseer.image.resolve import ResolvedImage, resolve
from bootseer.image.traces import TraceStore

log = logging.getLogger(__name__)

# A mount whose workers die this often, none having served for that long, is given up: its readers get errors.
_MAX_FAILURES = 6
_STEADY_S = 0.25
_FIRST_DELAY_S = 0.1  # before the third worker of a row; doubles from there
_SPARE_DELAY_S = 3.0  # the job that was just mounted has the CPU first
_STATUS_TIMEOUT_S = 1.0
_HELLO_TIMEOUT_S = 3.0
_LONGEST_DELAY_S = 5.0  # between attempts to adopt a mount whose worker is silent
_SILENT = "its worker does not answer"
_MAX_DEADLINE_S = 3600.0


@dataclass
class _Entry:
    spec: wire.WorkerSpec
    directory: Path
    device_fd: int
    lock: trio.Lock = field(default_factory=trio.Lock)


class Supervisor:
    """All mounts of a node. Use :meth:`run` in a nursery; the other methods serve the API."""

    def __init__(self, run_dir: Path, state_dir: Path, version: str) -> None:
        self.run_dir = run_dir
        self.state_dir = state_dir
        self._version = version
        self._mounts_dir = run_dir / "mounts"
        longest = self._mounts_dir / ("x" * 12) / SOCKET_NAME
        if len(os.fsencode(longest)) > MAX_SOCKET_PATH_BYTES:
            raise errors.ConfigError(
                f"{run_dir} is too long for a run directory", hint="sockets below it need a path of 107 bytes"
            )
        self._mounts_dir.mkdir(parents=True, exist_ok=True)
        for name in ("cache", "images", "traces"):
            (state_dir / name).mkdir(parents=True, exist_ok=True)
        self._entries: dict[str, _Entry] = {}
        self._fallbacks: Counter[str] = Counter()  # of this process; workers count theirs
        self._claimed: set[Path] = set()  # mount points that a mount in progress has chosen
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
            async with trio.open_nursery() as adopting:  # at once: one that does not answer takes its time
                for directory in self._mounts_dir.iterdir():
                    adopting.start_soon(self._adopt, directory)
            self._sort_by_age()
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                if self._spare is not None:
                    self._spare.discard()

    # -- the API's verbs -------------------------------------------------------------------------------------

    async def status(self) -> wire.Status:
        """The whole node. ``fallbacks``: mounts that lack a capability, times that a cache or trace failed.

        A worker that does not answer at once is left out of them.
        """
        fallbacks = self._fallbacks.copy()

        async def ask(entry: _Entry) -> None:
            with trio.move_on_after(_STATUS_TIMEOUT_S), contextlib.suppress(errors.BootseerError):
                values = (await call(entry.directory, "statistics"))[0].values
                lacking: dict[str, str] = values.get("session.fallbacks", {})
                fallbacks.update(name for name, why in lacking.items() if why != "not wanted")
                prefix = "file.fallback_"
                counts = {
                    name.removeprefix(prefix): n for name, n in values.items() if name.startswith(prefix)
                }
                fallbacks.update({name: n for name, n in counts.items() if n})

        async with trio.open_nursery() as nursery:
            for entry in self._entries.values():
                if entry.spec.mount.state == "ready":
                    nursery.start_soon(ask, entry)
        return wire.Status(
            version=self._version,
            api_version=wire.API_VERSION,
            pid=os.getpid(),
            uptime_s=round(time.monotonic() - self._started, 3),
            kernel=platform.release(),
            spare_ready=self._spare is not None and self._spare.alive,
            mounts=self.mounts(),
            fallbacks=dict(fallbacks),
            state_dir=str(self.state_dir),
            run_dir=str(self.run_dir),
        )

    def mounts(self) -> list[wire.Mount]:
        """All mounts, oldest first. A lazily unmounted one that still has users is none any more."""
        return [e.spec.mount for e in self._entries.values() if e.spec.mount.state != "unmounted"]

    def get(self, mount_id: str) -> wire.Mount:
        """One mount."""
        return self._entry(mount_id).spec.mount

    async def mount(self, request: wire.MountRequest) -> wire.Mount:
        """Resolve the image, start a worker on it."""
        if not 0 < request.deadline_s <= _MAX_DEADLINE_S:
            raise errors.UsageError(f"a deadline lies between 0 and {_MAX_DEADLINE_S:.0f} s")
        # Abandoned when the daemon ends: it changes nothing but a cache, and a silent registry may take its time.
        image = await trio.to_thread.run_sync(
            lambda: resolve(request.image, state_dir=self.state_dir), abandon_on_cancel=True
        )
        mount_id = secrets.token_hex(6)
        directory = self._mounts_dir / mount_id
        mountpoint = Mountpoint.choose(request.mountpoint, directory / "fuse")
        if mountpoint.path in self._claimed:
            raise errors.UsageError(f"something is being mounted on {mountpoint.path}")
        self._claimed.add(mountpoint.path)
        try:
            await trio.to_thread.run_sync(mountpoint.prepare)
            try:
                (directory / "state").mkdir(parents=True)
                spec = self._make_spec(request, mount_id, directory, mountpoint, image)
                self._store(directory, spec)
                pid, device_fd = await self._start_worker(directory, None)
            except BaseException:
                # Nothing was mounted there before, so what is there now is of the worker that failed.
                mountpoint.detach()
                mountpoint.remove()
                shutil.rmtree(directory, ignore_errors=True)
                raise
        except OSError as error:
            raise errors.InternalError(f"{error.filename}: {error.strerror}") from None
        finally:
            self._claimed.discard(mountpoint.path)
        entry = _Entry(spec, directory, device_fd)
        self._entries[mount_id] = entry
        self._set(entry, state="ready", worker_pid=pid)
        self._watch(entry, pid)
        return spec.mount

    async def unmount(self, mount_id: str, *, lazy: bool) -> wire.Mount:
        """End a mount; UsageError when it is busy. Lazily, it is gone for all but those who use it."""
        entry = self._entry(mount_id)
        async with entry.lock:
            entry = self._entry(mount_id)
            if entry.spec.mount.state != "failed":
                try:
                    await call(entry.directory, "unmount", lazy=lazy)
                except errors.UsageError as error:
                    raise errors.UsageError(f"mount {mount_id} is busy", hint=error.hint) from None
                except errors.BootseerError as error:
                    if not lazy:
                        raise
                    log.warning("mount %s is unmounted without its worker: %s", mount_id, error)
                    Mountpoint.of(entry.spec).detach()
                    if entry.spec.mount.worker_pid > 0:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(entry.spec.mount.worker_pid, signal.SIGKILL)
            self._set(entry, state="unmounted")
            if not lazy or entry.device_fd < 0:
                self._forget(entry)
        return entry.spec.mount

    async def statistics(self, mount_id: str) -> dict[str, Any]:
        """Counters of the worker; they start anew with each worker."""
        return (await self._call(mount_id, "statistics")).values

    async def tell(self, mount_id: str, op: wire.WorkerOp) -> wire.Mount:
        """``ready`` or ``prefetch``."""
        await self._call(mount_id, op)
        entry = self._entry(mount_id)
        if op == "ready":
            entry.spec.ready = True
            self._set(entry)
        return entry.spec.mount

    async def _call(self, mount_id: str, op: wire.WorkerOp) -> wire.WorkerReply:
        async with self._entry(mount_id).lock:  # a worker that is being replaced cannot answer
            entry = self._entry(mount_id)
            if entry.spec.mount.state == "failed":
                raise errors.UsageError(f"mount {mount_id} has failed: {entry.spec.mount.error}")
            reply, _ = await call(entry.directory, op)
            return reply

    # -- workers ---------------------------------------------------------------------------------------------

    def _make_spec(
        self,
        request: wire.MountRequest,
        mount_id: str,
        directory: Path,
        mountpoint: Mountpoint,
        image: ResolvedImage,
    ) -> wire.WorkerSpec:
        map_path = directory / "chunkmap"
        map_path.write_bytes(image.chunk_map)
        plan_path = directory / "plan.json"
        chunk_map = native.ChunkMap.parse(image.chunk_map)
        plan, trace_path = self._open_traces(request, mount_id, image.manifest_digest, chunk_map)
        plan_path.write_text(json.dumps(plan))
        mount = wire.Mount(
            id=mount_id,
            image=request.image,
            digest=image.manifest_digest,
            state="starting",
            fuse_mountpoint=str(mountpoint.path),
            image_path=str(mountpoint.path / "image.erofs"),
            worker_pid=0,
            restarts=0,
            created_unix_s=time.time(),
            config=image.config,
            trace_path=trace_path,
            label=request.label,
        )
        return wire.WorkerSpec(
            mount=mount,
            chunk_map_path=str(map_path),
            plan_path=str(plan_path),
            blobs=image.blobs,
            cache_dir=str(self.state_dir / "cache"),
            cache_key=image.cache_key,
            state_dir=str(directory / "state"),
            prefetch=request.prefetch,
            record=bool(trace_path),
            background_fill=request.background_fill,
            deadline_s=request.deadline_s,
            made_mountpoint=mountpoint.made,
        )

    def _open_traces(
        self, request: wire.MountRequest, mount_id: str, digest: str, chunk_map: native.ChunkMap
    ) -> tuple[list[tuple[int, int]], str]:
        """Plan and path of the recording. Traces make a start fast; without them it works all the same."""
        plan: list[tuple[int, int]] = []
        path = ""
        try:
            if request.prefetch:
                plan = self._traces.plan(digest, chunk_map)
            if request.record:
                path = str(self._traces.recording_path(digest, mount_id))
        except OSError as error:
            log.warning("mount %s does without traces: %s", mount_id, error)
            self._fallbacks["trace_store"] += 1
        return plan, path

    def _prepare_spare(self) -> None:
        try:
            self._spare = Spare(self.run_dir / "worker.log")
        except errors.BootseerError as error:
            log.error("no spare worker: %s", error)  # the next mount tries for itself

    async def _start_worker(self, directory: Path, device_fd: int | None) -> tuple[int, int]:
        spare = self._spare
        self._spare = None
        try:
            if spare is None or not spare.alive:
                spare = Spare(self.run_dir / "worker.log")
            pid, fd = await spare.start(directory, device_fd)
        finally:
            # After the start, so that the next interpreter does not compete with this one for a core.
            assert self._nursery is not None
            self._nursery.start_soon(self._prepare_spare_later)
        self._children[pid] = spare.process
        return pid, fd

    async def _prepare_spare_later(self) -> None:
        await trio.sleep(_SPARE_DELAY_S)
        if self._spare is None:
            self._prepare_spare()

    def _watch(self, entry: _Entry, pid: int) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(self._watch_workers, entry, pid)

    async def _watch_workers(self, entry: _Entry, pid: int) -> None:
        """Replace each worker that dies, until the mount ends or is given up."""
        failures = 0
        while True:
            started = trio.current_time()
            await _wait_death(pid)
            if child := self._children.pop(pid, None):
                child.wait()
            failures = 1 if trio.current_time() - started >= _STEADY_S else failures + 1
            async with entry.lock:
                if self._entries.get(entry.spec.mount.id) is not entry:
                    return
                if entry.spec.mount.state == "unmounted" or _is_unmounted(entry.device_fd):
                    log.info("mount %s has ended", entry.spec.mount.id)
                    self._set(entry, state="unmounted")
                    self._forget(entry)
                    return
                log.warning("worker %d of mount %s died; resuming", pid, entry.spec.mount.id)
                self._set(entry, state="restarting", restarts=entry.spec.mount.restarts + 1)
                why = "its workers die as soon as they serve it"
                restarted = None
                while restarted is None and failures < _MAX_FAILURES:
                    if failures > 1:
                        await trio.sleep(_FIRST_DELAY_S * 2 ** (failures - 2))
                    try:
                        restarted = await self._start_worker(entry.directory, entry.device_fd)
                    except errors.BootseerError as error:
                        log.error("mount %s: %s", entry.spec.mount.id, error)
                        why = error.message
                        failures += 1
                if restarted is None:
                    self._give_up(entry, why)
                    return
                pid, fd = restarted
                os.close(fd)  # a duplicate of the one that we hold
                self._set(entry, state="ready", worker_pid=pid)

    def _give_up(self, entry: _Entry, why: str) -> None:
        """Readers get errors instead of waiting for a worker that will not come."""
        log.error("mount %s is given up: %s", entry.spec.mount.id, why)
        self._set(entry, state="failed", error=why, worker_pid=0)
        os.close(entry.device_fd)  # the last one: the kernel ends the connection
        entry.device_fd = -1
        Mountpoint.of(entry.spec).detach()

    async def _adopt(self, directory: Path) -> None:
        try:
            spec = wire.decode((directory / "spec.json").read_bytes(), wire.WorkerSpec)
            if spec.mount.id != directory.name:
                raise errors.UsageError(f"its spec.json is of mount {spec.mount.id}")
        except (OSError, errors.UsageError) as error:
            log.warning("%s is not a mount: %s", directory, error)
            shutil.rmtree(directory, ignore_errors=True)
            return
        entry = _Entry(spec, directory, -1)
        if await self._take_over(entry):
            return
        # A machine that is too busy, a debugger: nothing is lost yet, so nothing is cleared.
        self._entries[spec.mount.id] = entry
        self._set(
            entry,
            state="unmounted" if spec.mount.state == "unmounted" else "restarting",
            worker_pid=owner_pid(directory),
            error=_SILENT,
        )
        assert self._nursery is not None
        self._nursery.start_soon(self._take_over_later, entry)

    async def _take_over_later(self, entry: _Entry) -> None:
        delay_s = _FIRST_DELAY_S
        while True:
            await trio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
            async with entry.lock:
                if self._entries.get(entry.spec.mount.id) is not entry or await self._take_over(entry):
                    return

    async def _take_over(self, entry: _Entry) -> bool:
        """Adopt a mount whose worker lives, clear one whose worker is dead; False: neither can be told yet."""
        mount = entry.spec.mount
        try:
            reply, fd = await call(entry.directory, "hello", timeout_s=_HELLO_TIMEOUT_S)
        except WorkerDeadError as error:
            # Its descriptor died with it and with our predecessor: the mount cannot be saved, only cleared.
            log.warning("mount %s was lost: %s", mount.id, error)
            Mountpoint.of(entry.spec).detach()
            self._forget(entry)
            return True
        except errors.BootseerError as error:
            log.warning("mount %s cannot be adopted yet: %s", mount.id, error)
            return False
        if fd is None:  # no descriptor was free to receive it
            log.warning("mount %s cannot be adopted yet: its descriptor did not arrive", mount.id)
            return False
        if (protocol := reply.values.get("protocol")) != wire.WORKER_PROTOCOL:
            # What can be had without more: its bytes, an unmount, and a successor of this release when it dies.
            log.warning("the worker of mount %s speaks protocol %s", mount.id, protocol)
        entry.device_fd = fd
        self._entries[mount.id] = entry
        state: wire.MountState = "unmounted" if reply.values.get("detached") else "ready"
        self._set(entry, state=state, worker_pid=reply.pid, error="")
        self._watch(entry, reply.pid)
        log.info("adopted mount %s (worker %d)", mount.id, reply.pid)
        return True

    # -- records ---------------------------------------------------------------------------------------------

    def _entry(self, mount_id: str) -> _Entry:
        entry = self._entries.get(mount_id)
        if entry is None or entry.spec.mount.state == "unmounted":
            raise errors.NotFoundError(f"there is no mount {mount_id}")
        return entry

    def _sort_by_age(self) -> None:
        by_age = sorted(self._entries.items(), key=lambda item: item[1].spec.mount.created_unix_s)
        self._entries = dict(by_age)

    def _set(self, entry: _Entry, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(entry.spec.mount, name, value)
        try:
            self._store(entry.directory, entry.spec)
        except OSError as error:
            # A worker that died is still replaced; the next daemon asks the worker for what matters.
            log.error("mount %s: its state is not stored: %s", entry.spec.mount.id, error)

    @staticmethod
    def _store(directory: Path, spec: wire.WorkerSpec) -> None:
        temporary = directory / "spec.json.tmp"
        # The origin's headers may hold a token, so this is for nobody else.
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(wire.encode(spec))
        temporary.replace(directory / "spec.json")

    def _forget(self, entry: _Entry) -> None:
        self._entries.pop(entry.spec.mount.id, None)
        if entry.device_fd >= 0:
            os.close(entry.device_fd)
            entry.device_fd = -1
        Mountpoint.of(entry.spec).remove()
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
    """Whether the kernel has ended the connection: /dev/fuse then polls as an error."""
    poll = select.poll()
    poll.register(device_fd, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))
