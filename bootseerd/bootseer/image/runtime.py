"""A command in an image: EROFS on the FUSE file, an overlay on it, and a container runtime.

Everything is undone in reverse order, whatever happens in between. Runtimes: ``runc`` and ``crun`` (an OCI runtime
bundle, specification 1.0) or plain namespaces (``native.spawn_namespaced``: no cgroup, no limited capabilities).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import platform
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from bootseer import native
from bootseer.core import paths
from bootseer.core.errors import (
    BackendUnavailableError,
    BootseerError,
    ConfigError,
    IntegrityError,
    PermissionDeniedError,
    UsageError,
)
from bootseer.core.mountinfo import mount_table
from bootseer.image.bundle import (
    RUNTIMES,
    Command,
    NotExecutableError,
    ProgramNotFoundError,
    RuntimeName,
    Volume,
    check_program,
    check_runtime,
    host_volumes,
    make_directory,
    resolve_process,
    runtime_config,
)
from bootseer.image.signals import Interrupted, Signals

__all__ = [
    "RUNTIMES",
    "Command",
    "Interrupted",
    "RuntimeFailedError",
    "RuntimeName",
    "Signals",
    "Volume",
    "choose",
    "detach_others",
    "forget",
    "mount_erofs",
    "mounted_erofs",
    "overlay",
    "private_mounts",
    "probe",
    "remove_abandoned",
    "root_file_system",
    "run",
    "select",
    "temporary_work_dir",
    "unmount",
]

_PROBE_TIMEOUT_S = 10.0
_FORGET_FAILURE_S = 3600.0  # a machine may have been repaired meanwhile
_WORK_PREFIX = "bootseer-run-"
_LOCK = "lock"
_STATE_PREFIX = "state-"
_CLONE_NEWNS = 0x20000  # sched.h
_MS_SLAVE, _MS_REC = 1 << 19, 1 << 14  # sys/mount.h


class RuntimeFailedError(BootseerError):
    """A container runtime could not start the command."""

    code = "runtime"
    exit_code = 125  # as container engines


# -- file systems --------------------------------------------------------------------------------------------------


def private_mounts() -> None:
    """Give this process a mount namespace of its own, which still follows the host's.

    What is mounted from here on is seen by nobody else and is gone with the last process that uses it, even after
    SIGKILL. For a program whose only thread is the caller.
    """
    if os.geteuid() != 0:
        raise PermissionDeniedError("this user may not mount", hint="run it as root")
    libc = ctypes.CDLL(None, use_errno=True)
    for result in (
        libc.unshare(_CLONE_NEWNS),
        libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None),
    ):
        if result != 0:
            raise PermissionDeniedError(
                f"no mount namespace: {os.strerror(ctypes.get_errno())}", hint="mounting needs root"
            )


def detach_others(own: Path, volumes: Sequence[Volume]) -> None:
    """In our own mount namespace, let go of what other mounts' workers serve.

    A copy of a mount keeps its worker alive, for as long as our command runs. Not those that a volume comes from.
    """
    for entry in mount_table():
        is_ours = entry.file_system == "fuse.bootseer" and entry.path != str(own)
        if is_ours and not any(Path(volume.source).is_relative_to(entry.path) for volume in volumes):
            with suppress(OSError):
                native.umount(entry.path, lazy=True)


@contextmanager
def root_file_system(image_path: str, work_dir: Path, keep_in: Path | None = None) -> Iterator[Path]:
    """Mount an EROFS image and a writable overlay over it; yields the root. Errors: as :func:`mounted_erofs`."""
    lower = work_dir / "image"
    with mounted_erofs(image_path, lower), overlay(lower, work_dir, keep_in=keep_in) as root:
        yield root


@contextmanager
def mounted_erofs(image_path: str, target: Path) -> Iterator[str]:
    """Mount an EROFS image; yields the way it was mounted.

    BackendUnavailableError: the image cannot be read. IntegrityError: it is no EROFS. ConfigError: the kernel has none.
    """
    target.mkdir(parents=True, exist_ok=True)
    how = mount_erofs(image_path, target)
    try:
        yield how
    finally:
        unmount(target)


def mount_erofs(image_path: str, target: Path) -> str:
    """Mount an EROFS image until somebody unmounts it; returns the way. Errors: as :func:`mounted_erofs`."""
    try:
        return native.mount_erofs(image_path, str(target))
    except OSError as error:
        what = f"the image cannot be mounted: {os.strerror(error.errno or 0)}"
        match error.errno:
            case errno.EIO | errno.ETIMEDOUT | errno.ENOTCONN:
                raise BackendUnavailableError(what, hint="the origin does not deliver its metadata") from None
            case errno.EINVAL | errno.EUCLEAN | errno.EOPNOTSUPP:
                raise IntegrityError(what, hint="is it an EROFS image that this kernel knows?") from None
            case errno.ENODEV:
                raise ConfigError(what, hint="this kernel has no EROFS, see `bootseer doctor`") from None
            case errno.EPERM | errno.EACCES:
                raise PermissionDeniedError(what, hint="mounting needs root") from None
            case _:
                raise


@contextmanager
def overlay(lower: Path, work_dir: Path, *, keep_in: Path | None = None) -> Iterator[Path]:
    """A writable view of ``lower``, seen at ``work_dir/root``.

    What is written goes to ``upper`` in ``keep_in``, or in ``work_dir``, which the caller throws away. UsageError when
    another run uses ``keep_in``, or when its file system cannot hold an overlay.
    """
    root = work_dir / "root"
    store = work_dir if keep_in is None else keep_in
    for path in (root, store / "upper", store / "work"):
        path.mkdir(parents=True, exist_ok=True)
    with _only_user(store):
        try:
            native.mount_overlay([str(lower)], str(store / "upper"), str(store / "work"), str(root))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise UsageError(
                f"the file system of {store} cannot hold what a command writes",
                hint="overlayfs needs a local one: set TMPDIR, or give --upper",
            ) from None
        try:
            yield root
        finally:
            unmount(root)


@contextmanager
def _only_user(store: Path) -> Iterator[None]:
    """Two overlays on one upper directory would corrupt each other; the kernel only warns."""
    fd = os.open(store, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UsageError(f"another command runs on {store}") from None
    finally:
        os.close(fd)


def unmount(target: Path) -> None:
    """Unmount; lazily when something still uses it, so that nothing is ever left in the name space."""
    try:
        native.umount(str(target))
    except OSError:
        with suppress(OSError):  # not mounted any more
            native.umount(str(target), lazy=True)


@contextmanager
def temporary_work_dir(base: Path | None = None, *, keep: bool = False) -> Iterator[Path]:
    """A directory for overlay, bundle and runtime state, removed at the end unless ``keep``."""
    if base is not None:
        base.mkdir(parents=True, exist_ok=True)
    work_dir = Path(tempfile.mkdtemp(prefix=_WORK_PREFIX, dir=base)).resolve()
    # Held as long as we live, and by a command in plain namespaces as long as that lives.
    lock = os.open(work_dir / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield work_dir
    finally:
        if keep:
            (work_dir / _LOCK).unlink(missing_ok=True)
        else:
            remove_tree(work_dir)
        os.close(lock)


def remove_abandoned(base: Path | None = None) -> None:
    """Remove what runs left that were killed outright. A container that still runs keeps its files."""
    for work_dir in (base or Path(tempfile.gettempdir())).glob(f"{_WORK_PREFIX}*"):
        try:
            lock = os.open(work_dir / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_uid == os.geteuid() and _delete_stopped(work_dir):
                remove_tree(work_dir)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def _delete_stopped(work_dir: Path) -> bool:
    """Have each runtime forget its containers; not those that run."""
    for state_dir in work_dir.glob(f"{_STATE_PREFIX}*"):
        name = state_dir.name.removeprefix(_STATE_PREFIX)  # another runtime would not know a live container
        for container in state_dir.iterdir():
            command = [name, "--root", str(state_dir), "delete", container.name]
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, check=False, capture_output=True, timeout=_PROBE_TIMEOUT_S)
            if container.exists():
                return False
    return True


def remove_tree(work_dir: Path) -> None:
    """Remove a work directory, but nothing that is still mounted below it."""
    if not any(Path(entry.path).is_relative_to(work_dir) for entry in mount_table()):
        shutil.rmtree(work_dir, ignore_errors=True)


# -- which runtime -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """What a runtime did when it was asked to create a container. ``why`` is empty when it works."""

    works: bool
    start_s: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Selection:
    """The runtime to use, and those that were preferred but do not work here, with the reason."""

    name: RuntimeName
    skipped: Mapping[str, str]
    is_new: bool = False  # found out just now, not remembered


def choose(wanted: str, memory: Path | None = None) -> RuntimeName:
    """The name of what :func:`select` selects."""
    return select(wanted, memory).name


def select(wanted: str, memory: Path | None = None) -> Selection:
    """A runtime by name, or for ``auto`` the first of :data:`RUNTIMES` that is installed and works.

    Whether one works is found out once and remembered in ``memory`` (default: beside the daemon's socket) for as long
    as the machine runs and the program is the same. UsageError, ConfigError.
    """
    if check_runtime(wanted) == "auto":
        return _select_working(memory or default_memory())
    name = next(name for name in RUNTIMES if name == wanted)
    if name != "namespaces" and shutil.which(name) is None:
        raise ConfigError(f"{name} is not installed", hint=f"apt install {name}")
    return Selection(name, {})


def default_memory() -> Path:
    """Beside the daemon's socket."""
    return paths.socket_path().parent / "runtimes.json"


def _select_working(memory: Path) -> Selection:
    known = _recall(memory)
    skipped: dict[str, str] = {}
    is_new = False
    for name in RUNTIMES:
        program = shutil.which(name)
        if name == "namespaces":
            return Selection(name, skipped, is_new)
        if program is None:
            continue
        key = _identity(program)
        found = known.get(key)
        if found is None:
            found = probe(name)
            is_new = True
            known[key] = found
            _remember(memory, known)
        if found.works:
            return Selection(name, skipped, is_new)
        skipped[name] = found.why
    raise AssertionError("namespaces come last")


def probe(name: RuntimeName) -> Probe:
    """Have a runtime create a container and delete it again, without running anything in it."""
    container = f"bootseer-probe-{secrets.token_hex(4)}"
    with temporary_work_dir() as work_dir:
        root = work_dir / "root"
        root.mkdir()
        (root / "program").touch(0o755)  # looked for, never executed
        process = resolve_process(root, {}, Command(["/program"]))
        (work_dir / "config.json").write_text(json.dumps(runtime_config(root, process, Command([]))))
        state = [name, "--root", str(work_dir / f"{_STATE_PREFIX}{name}")]
        log = work_dir / "log"
        started = time.monotonic()
        try:
            with log.open("wb") as output:
                create = [*state, "create", "--bundle", str(work_dir), container]
                _quiet(create, output)
                start_s = time.monotonic() - started
                _quiet([*state, "delete", "--force", container], output)
            return Probe(True, round(start_s, 4))
        except (OSError, subprocess.SubprocessError) as error:
            with suppress(OSError, subprocess.SubprocessError):
                _quiet([*state, "delete", "--force", container], subprocess.DEVNULL, check=False)
            lines = log.read_text(errors="replace").splitlines()
            return Probe(False, why=(lines[-1] if lines else str(error))[:200])


def _quiet(argv: list[str], output: Any, *, check: bool = True) -> None:
    subprocess.run(
        argv,
        check=check,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=output,
        timeout=_PROBE_TIMEOUT_S,
    )


def _identity(program: str) -> str:
    """Changes with whatever may change the answer: the program, the kernel, a reboot (other cgroups)."""
    status = Path(program).stat()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{program}:{status.st_mtime_ns}:{status.st_size}:{platform.release()}:{boot}"


def _recall(memory: Path) -> dict[str, Probe]:
    try:
        fresh = time.time() - memory.stat().st_mtime < _FORGET_FAILURE_S
        known = {str(key): Probe(**value) for key, value in json.loads(memory.read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return {key: found for key, found in known.items() if found.works or fresh}


def _remember(memory: Path, known: Mapping[str, Probe]) -> None:
    """Best effort: without memory, the next start finds out again."""
    text = json.dumps({key: vars(found) for key, found in known.items()})
    with suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        temporary = memory.with_name(f"{memory.name}.{os.getpid()}")
        temporary.write_text(text)
        temporary.replace(memory)


def forget(memory: Path | None = None) -> None:
    """Find out again what works."""
    (memory or default_memory()).unlink(missing_ok=True)


# -- running -------------------------------------------------------------------------------------------------------


def run(
    root: Path,
    config: Mapping[str, Any],
    command: Command,
    runtime: RuntimeName,
    work_dir: Path,
    signals: Signals | None = None,
) -> int:
    """Run to the end; returns what a shell would show (128 + signal number for a death by signal).

    Signals that arrive meanwhile are passed on to the command (:mod:`bootseer.image.signals`). ProgramNotFoundError,
    NotExecutableError, UsageError and IntegrityError before anything has started; RuntimeFailedError when the runtime
    could not start it, after having said why on stderr.
    """
    process = resolve_process(root, config, command)
    check_program(root, process)
    make_directory(root, process["cwd"])
    with Signals() if signals is None else nullcontext(signals) as forwarded:
        if runtime == "namespaces":
            return _run_namespaces(root, process, command, forwarded)
        return _run_oci(root, process, command, runtime, work_dir, forwarded)


def _run_oci(
    root: Path,
    process: Mapping[str, Any],
    command: Command,
    runtime: RuntimeName,
    work_dir: Path,
    signals: Signals,
) -> int:
    bundle = work_dir / "bundle"
    bundle.mkdir(exist_ok=True)
    (bundle / "config.json").write_text(json.dumps(runtime_config(root, process, command)))
    container = f"bootseer-{secrets.token_hex(6)}"
    state_dir = work_dir / f"{_STATE_PREFIX}{runtime}"
    state = [runtime, "--root", str(state_dir)]
    pid_file = work_dir / "container.pid"
    signals.check()
    child = subprocess.Popen([*state, "run", "--bundle", str(bundle), "--pid-file", str(pid_file), container])
    try:
        code = signals.wait(
            child.pid,
            child.poll,
            lambda: subprocess.run([*state, "kill", container, "KILL"], check=False, capture_output=True),
        )
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        if (state_dir / container).exists():
            subprocess.run([*state, "delete", "--force", container], check=False, capture_output=True)
    if code != 0 and not pid_file.exists():
        raise RuntimeFailedError(f"{runtime} could not start {process['args'][0]}")
    return code if code >= 0 else 128 - code


def _run_namespaces(root: Path, process: Mapping[str, Any], command: Command, signals: Signals) -> int:
    binds = [(v.source, v.target, v.read_only) for v in [*host_volumes(), *command.volumes]]
    for volume in command.volumes:  # also where a link of the image leads to nothing, as OCI runtimes do
        target = PurePosixPath(volume.target)
        make_directory(root, str(target if Path(volume.source).is_dir() else target.parent))
    environment = dict(entry.partition("=")[::2] for entry in process["env"])
    user = process["user"]
    signals.check()
    try:
        pid = native.spawn_namespaced(
            str(root),
            list(process["args"]),
            environment,
            process["cwd"],
            binds=binds,
            hostname=command.host_name,
            uid=user["uid"],
            gid=user["gid"],
            groups=user["additionalGids"],
        )
    except UsageError as error:  # the set-up of the root, not the command
        raise RuntimeFailedError(error.message, hint=error.hint) from None
    except FileNotFoundError as error:
        raise ProgramNotFoundError(f"{error.strerror or error}") from None
    except OSError as error:
        raise NotExecutableError(f"{error.strerror or error}") from None

    def poll() -> int | None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        return None if ended == 0 else os.waitstatus_to_exitcode(status)

    code = signals.wait(pid, poll, lambda: os.kill(pid, 9))
    return code if code >= 0 else 128 - code
