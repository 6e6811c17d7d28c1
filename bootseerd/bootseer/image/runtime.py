"""A command in an image: EROFS on the FUSE file, an overlay on it, and a container runtime.

Everything is undone in reverse order, whatever happens in between. Runtimes: ``runc`` and ``crun`` (an OCI runtime
bundle, specification 1.0) or plain namespaces (``native.spawn_namespaced``).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bootseer import native
from bootseer.core.errors import ConfigError, UsageError

RuntimeName = Literal["runc", "crun", "namespaces"]
RUNTIMES: tuple[RuntimeName, ...] = ("runc", "crun", "namespaces")

NOT_EXECUTABLE, NOT_FOUND = 126, 127  # what shells and container engines exit with
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What container engines grant by default.
_CAPABILITIES = [
    f"CAP_{name}"
    for name in [
        "AUDIT_WRITE",
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "MKNOD",
        "NET_BIND_SERVICE",
        "SETFCAP",
        "SETGID",
        "SETPCAP",
        "SETUID",
        "SYS_CHROOT",
    ]
]


@dataclass(frozen=True)
class Volume:
    """A bind mount: ``source`` of the host at ``target`` in the image."""

    source: str
    target: str
    read_only: bool = False

    @classmethod
    def parse(cls, text: str) -> Volume:
        """``SRC:DST[:ro|rw]``."""
        source, _, rest = text.partition(":")
        target, _, mode = rest.partition(":")
        if not source or not target.startswith("/") or mode not in {"", "ro", "rw"}:
            raise UsageError(f"{text!r} is no volume", hint="SRC:DST or SRC:DST:ro")
        if not Path(source).exists():
            raise UsageError(f"volume source {source} does not exist")
        return cls(str(Path(source).absolute()), target, mode == "ro")


@dataclass(frozen=True)
class Command:
    """What runs in the image. Fields left empty come from the image's config."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = ""
    user: str = ""
    hostname: str = ""
    volumes: Sequence[Volume] = ()


@contextmanager
def root_file_system(image_path: str, work_dir: Path) -> Iterator[Path]:
    """Mount an EROFS image and a fresh writable overlay over it; yields the root."""
    with mounted_erofs(image_path, work_dir / "image"), overlay(work_dir / "image", work_dir) as root:
        yield root


@contextmanager
def mounted_erofs(image_path: str, target: Path) -> Iterator[str]:
    """Mount an EROFS image; yields the way it was mounted."""
    target.mkdir(parents=True, exist_ok=True)
    how = native.mount_erofs(image_path, str(target))
    try:
        yield how
    finally:
        unmount(target)


@contextmanager
def overlay(lower: Path, work_dir: Path) -> Iterator[Path]:
    """A writable view of ``lower``; what is written goes to ``work_dir/upper`` and is thrown away by the caller."""
    root = work_dir / "root"
    for path in (root, work_dir / "upper", work_dir / "work"):
        path.mkdir(parents=True, exist_ok=True)
    native.mount_overlay([str(lower)], str(work_dir / "upper"), str(work_dir / "work"), str(root))
    try:
        yield root
    finally:
        unmount(root)


def unmount(target: Path) -> None:
    """Unmount; lazily when something still uses it, so that nothing is ever left in the name space."""
    try:
        native.umount(str(target))
    except OSError:
        native.umount(str(target), lazy=True)


def choose(wanted: str) -> RuntimeName:
    """The runtime for ``auto``: the first that this machine has and that works with its cgroups."""
    if wanted == "auto":
        return next((name for name in ("runc", "crun") if shutil.which(name) and _works(name)), "namespaces")
    if wanted not in RUNTIMES:
        raise UsageError(f"{wanted!r} is no runtime", hint=f"one of auto, {', '.join(RUNTIMES)}")
    if wanted != "namespaces" and shutil.which(wanted) is None:
        raise ConfigError(f"{wanted} is not installed", hint=f"apt install {wanted}")
    return wanted


def _works(name: str) -> bool:
    # crun refuses a hybrid cgroup hierarchy (v1 controllers beside v2); runc works with it.
    return name != "crun" or Path("/sys/fs/cgroup/cgroup.controllers").exists()


def run(root: Path, config: Mapping[str, Any], command: Command, runtime: RuntimeName, work_dir: Path) -> int:
    """Run to the end; returns what a shell would show (128 + signal number for a death by signal).

    SIGINT, SIGTERM, SIGHUP and SIGQUIT that arrive meanwhile are passed on to the command.
    """
    process = resolve_process(root, config, command)
    if runtime == "namespaces":
        return _run_namespaces(root, process, command)
    return _run_oci(root, process, command, runtime, work_dir)


def resolve_process(root: Path, config: Mapping[str, Any], command: Command) -> dict[str, Any]:
    """The ``process`` object of the OCI runtime specification for a command in an image."""
    image = config.get("config") or {}
    environment = dict(entry.partition("=")[::2] for entry in image.get("Env") or [])
    environment.setdefault("PATH", _PATH)
    environment |= command.env
    argv = list(command.argv) or [*(image.get("Entrypoint") or []), *(image.get("Cmd") or [])]
    if not argv:
        raise UsageError("no command", hint="the image has no default command either; give one after --")
    uid, gid = _resolve_user(root, command.user or image.get("User") or "")
    capabilities = _CAPABILITIES if uid == 0 else []
    return {
        "terminal": False,
        "user": {"uid": uid, "gid": gid},
        "args": argv,
        "env": [f"{name}={value}" for name, value in environment.items()],
        "cwd": command.workdir or image.get("WorkingDir") or "/",
        "capabilities": {kind: capabilities for kind in ("bounding", "effective", "permitted")},
        "noNewPrivileges": False,
    }


def _resolve_user(root: Path, user: str) -> tuple[int, int]:
    """``uid[:gid]`` or names of the image's own passwd and group files."""
    name, _, group = user.partition(":")
    uid, gid = 0, 0
    if name:
        entries = _colon_file(root / "etc/passwd")
        entry = next((e for e in entries if len(e) > 3 and name in {e[0], e[2]}), None)
        if entry is not None:
            uid, gid = int(entry[2]), int(entry[3])
        elif name.isdecimal():
            uid = int(name)
        else:
            raise UsageError(f"the image has no user {name}")
    if group:
        entry = next(
            (e for e in _colon_file(root / "etc/group") if len(e) > 2 and group in {e[0], e[2]}), None
        )
        if entry is None and not group.isdecimal():
            raise UsageError(f"the image has no group {group}")
        gid = int(entry[2]) if entry is not None else int(group)
    return uid, gid


def _colon_file(path: Path) -> list[list[str]]:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    return [line.split(":") for line in text.splitlines()]


def runtime_config(root: Path, process: Mapping[str, Any], command: Command) -> dict[str, Any]:
    """config.json of an OCI runtime bundle. The network is the host's: a training job needs its fabric."""
    plain = ["nosuid", "noexec", "nodev"]
    mounts: list[dict[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {
            "destination": "/dev",
            "type": "tmpfs",
            "source": "tmpfs",
            "options": ["nosuid", "mode=755", "size=65536k"],
        },
        {
            "destination": "/dev/pts",
            "type": "devpts",
            "source": "devpts",
            "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"],
        },
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": [*plain, "mode=1777"]},
        {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": plain},
        {"destination": "/sys", "type": "none", "source": "/sys", "options": ["rbind", *plain, "ro"]},
    ]
    binds = (
        [Volume("/etc/resolv.conf", "/etc/resolv.conf", True)] if Path("/etc/resolv.conf").exists() else []
    )
    for volume in [*binds, *command.volumes]:
        options = ["rbind", "ro" if volume.read_only else "rw"]
        mounts.append(
            {"destination": volume.target, "type": "none", "source": volume.source, "options": options}
        )
    return {
        "ociVersion": "1.0.2",
        "process": dict(process),
        "root": {"path": str(root), "readonly": False},
        "hostname": command.hostname or "bootseer",
        "mounts": mounts,
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")],
            "resources": {"devices": [{"allow": True, "access": "rwm"}]},
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list"],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sysrq-trigger"],
        },
    }


def _run_oci(
    root: Path, process: Mapping[str, Any], command: Command, runtime: RuntimeName, work_dir: Path
) -> int:
    executable = process["args"][0]
    found = _which(root, executable, process)
    if found is None:
        return _say(f"{executable}: not found in the image", NOT_FOUND)
    bundle = work_dir / "bundle"
    bundle.mkdir(exist_ok=True)
    (bundle / "config.json").write_text(json.dumps(runtime_config(root, process, command)))
    name = f"bootseer-{secrets.token_hex(6)}"
    state = ["--root", str(work_dir / "runtime")]
    argv = [runtime, *state, "run", "--bundle", str(bundle), name]
    try:
        return _wait(subprocess.Popen(argv))
    finally:
        if (work_dir / "runtime" / name).exists():
            subprocess.run([runtime, *state, "delete", "--force", name], check=False, capture_output=True)


def _which(root: Path, executable: str, process: Mapping[str, Any]) -> Path | None:
    """Where the image has a program: only to tell "not found" (127) from the runtime's own failures."""
    if "/" in executable:
        candidates = [Path(process["cwd"]) / executable]
    else:
        path = next((e[5:] for e in process["env"] if e.startswith("PATH=")), _PATH)
        candidates = [Path(part) / executable for part in path.split(":") if part]
    for candidate in candidates:
        inside = root / candidate.relative_to("/") if candidate.is_absolute() else root / candidate
        if inside.is_symlink() or inside.exists():
            return inside
    return None


def _run_namespaces(root: Path, process: Mapping[str, Any], command: Command) -> int:
    binds = [(v.source, v.target, v.read_only) for v in command.volumes]
    environment = dict(entry.partition("=")[::2] for entry in process["env"])
    user = process["user"]
    try:
        pid = native.spawn_namespaced(
            str(root),
            list(process["args"]),
            environment,
            process["cwd"],
            binds=binds,
            hostname=command.hostname or "bootseer",
            uid=user["uid"],
            gid=user["gid"],
        )
    except FileNotFoundError:
        return _say(f"{process['args'][0]}: not found in the image", NOT_FOUND)
    except PermissionError:
        return _say(f"{process['args'][0]}: may not be executed", NOT_EXECUTABLE)
    with forwarded_signals(pid):
        _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _wait(process: subprocess.Popen[bytes]) -> int:
    with forwarded_signals(process.pid):
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def forwarded_signals(pid: int) -> Iterator[None]:
    """Pass signals that mean "end" on to a process, for the duration of the block."""

    def forward(number: int, _frame: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            stack.callback(signal.signal, number, signal.signal(number, forward))
        yield


def _say(message: str, code: int) -> int:
    os.write(2, f"bootseer: {message}\n".encode())
    return code


@contextmanager
def temporary_work_dir(base: Path | None = None) -> Iterator[Path]:
    """A directory for overlay, bundle and runtime state, removed at the end."""
    if base is not None:
        base.mkdir(parents=True, exist_ok=True)
    work_dir = Path(tempfile.mkdtemp(prefix="bootseer-run-", dir=base))
    try:
        yield work_dir
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)
