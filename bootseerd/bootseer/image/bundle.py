"""What a command in an image is made of: the image's config, the user's wishes, and an OCI runtime bundle.

Nothing is mounted or started here. The image is not trusted: its files are looked up with links followed inside the
root only, and what it says about itself may be of any type.
"""

from __future__ import annotations

import errno
import os
import platform
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from bootseer.core.errors import IntegrityError, UsageError

RuntimeName = Literal["runc", "crun", "namespaces"]
# In the order of preference: crun needs a few milliseconds where runc needs tens; namespaces isolate least.
RUNTIMES: tuple[RuntimeName, ...] = ("crun", "runc", "namespaces")

NOT_EXECUTABLE, NOT_FOUND = 126, 127  # what shells and container engines exit with
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MAX_LINKS = 40  # as the kernel
_MAX_ACCOUNTS_BYTES = 4 << 20
_MAX_ID = 2**32 - 2
_MAX_ID_DIGITS = 20  # int() refuses thousands of them
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
# The network is the host's, so its names are too: ranks of a job find each other by host name.
_HOST_FILES = ("/etc/resolv.conf", "/etc/hosts")


class ProgramNotFoundError(UsageError):
    """The image has no such program."""

    code = "program_not_found"
    exit_code = NOT_FOUND


class NotExecutableError(UsageError):
    """The image has such a file, but it cannot be executed."""

    code = "not_executable"
    exit_code = NOT_EXECUTABLE


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
            raise UsageError(f"{text!r} is no volume", hint="SRC:DST or SRC:DST:ro, DST absolute")
        parts = PurePosixPath(target).parts[1:]  # two slashes at the front would stay two
        if ".." in parts or not parts:
            raise UsageError(f"a volume cannot be mounted on {target}")
        if not Path(source).exists():
            raise UsageError(f"volume source {source} does not exist")
        return cls(str(Path(source).absolute()), str(PurePosixPath("/", *parts)), mode == "ro")


@dataclass(frozen=True)
class Command:
    """What runs in the image. Fields left empty come from the image's config."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = ""
    user: str = ""
    hostname: str = ""  # empty: the host's, since the network is the host's
    volumes: Sequence[Volume] = ()
    terminal: bool = False

    @property
    def host_name(self) -> str:
        """What the command sees as its host name."""
        return self.hostname or platform.node()


def inside(root: Path, path: str | PurePosixPath) -> Path:
    """Where ``path`` of the image is on the host: links are followed, but never out of ``root``.

    The last component need not exist. OSError (ELOOP) for a loop of links.
    """
    todo = [part for part in PurePosixPath(path).parts if part != "/"]
    done: list[str] = []
    links = 0
    while todo:
        part = todo.pop(0)
        if part == "..":
            if done:
                done.pop()
            continue
        here = root.joinpath(*done, part)
        try:
            target = PurePosixPath(here.readlink())
        except OSError:  # no link, or nothing at all
            done.append(part)
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        if target.is_absolute():
            done = []
        todo = [component for component in target.parts if component != "/"] + todo
    return root.joinpath(*done)


def check_runtime(wanted: str) -> str:
    """``auto`` or one of :data:`RUNTIMES`; UsageError for anything else."""
    if wanted == "auto" or wanted in RUNTIMES:
        return wanted
    raise UsageError(f"{wanted!r} is no runtime", hint=f"one of auto, {', '.join(RUNTIMES)}")


def resolve_process(root: Path, config: Mapping[str, Any], command: Command) -> dict[str, Any]:
    """The ``process`` object of the OCI runtime specification 1.0 for a command in an image.

    UsageError for a user that the image lacks, IntegrityError for a config of wrong types.
    """
    image = _section(config)
    environment = dict(entry.partition("=")[::2] for entry in _strings(image, "Env"))
    environment.setdefault("PATH", _PATH)
    argv = list(command.argv) or [*_strings(image, "Entrypoint"), *_strings(image, "Cmd")]
    if not argv or not argv[0]:
        raise UsageError("no command", hint="the image has no default command either; give one after --")
    uid, gid, groups, home = _account(root, command.user or _text(image, "User"))
    environment.setdefault("HOME", home)
    if command.terminal:
        environment.setdefault("TERM", os.environ.get("TERM", "xterm"))
    environment |= command.env
    cwd = str(PurePosixPath("/", command.workdir or _text(image, "WorkingDir") or "/"))
    held = _CAPABILITIES if uid == 0 else []
    return {
        "terminal": command.terminal,
        "user": {"uid": uid, "gid": gid, "additionalGids": groups},
        "args": argv,
        "env": [f"{name}={value}" for name, value in environment.items()],
        "cwd": cwd,
        "capabilities": {"bounding": _CAPABILITIES, "effective": held, "permitted": held},
        "noNewPrivileges": False,
    }


def _section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    section = config.get("config") or {}
    if not isinstance(section, Mapping):
        raise IntegrityError("the image's config is malformed: config is no object")
    return section


def _strings(section: Mapping[str, Any], key: str) -> list[str]:
    value = section.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, str) and "\0" not in item for item in value):
        raise IntegrityError(f"the image's config is malformed: {key} is no list of strings")
    return value


def _text(section: Mapping[str, Any], key: str) -> str:
    value = section.get(key) or ""
    if not isinstance(value, str) or "\0" in value:
        raise IntegrityError(f"the image's config is malformed: {key} is no string")
    return value


def _account(root: Path, user: str) -> tuple[int, int, list[int], str]:
    """uid, gid, supplementary gids and home of ``uid[:gid]`` or of names in the image's passwd and group files."""
    name, _, group = user.partition(":")
    if not name and not group:
        return 0, 0, [], "/root"
    uid, gid, home, login = 0, 0, "/", "root"
    if name:
        entry = next((e for e in _accounts(root, "etc/passwd", 4) if name in {e[0], e[2]}), None)
        if entry is not None:
            uid, gid, login = _number(entry[2], user), _number(entry[3], user), entry[0]
            home = (entry[5] if len(entry) > 5 else "") or "/"
        elif name.isdecimal():
            uid, login = _number(name, user), ""
        else:
            raise UsageError(f"the image has no user {name}")
    groups = _accounts(root, "etc/group", 3)
    if group:
        entry = next((e for e in groups if group in {e[0], e[2]}), None)
        if entry is None and not group.isdecimal():
            raise UsageError(f"the image has no group {group}")
        return uid, _number(entry[2] if entry is not None else group, user), [], home
    # As login does, and only where the group was left to the image.
    more = [int(e[2]) for e in groups if len(e) > 3 and login and login in e[3].split(",") and _is_id(e[2])]
    return uid, gid, [number for number in more if number != gid], home


def _is_id(text: str) -> bool:
    return text.isdecimal() and len(text) <= _MAX_ID_DIGITS and int(text) <= _MAX_ID


def _number(text: str, user: str) -> int:
    if not _is_id(text):
        raise UsageError(f"{user[:40]!r} is no user of the image: {text[:20]!r} is no id")
    return int(text)


def _accounts(root: Path, name: str, least_fields: int) -> list[list[str]]:
    try:
        path = inside(root, name)
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not make us wait
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return []
            text = file.read(_MAX_ACCOUNTS_BYTES).decode(errors="replace")
    except OSError:
        return []
    lines = (line.split(":") for line in text.splitlines())
    return [fields for fields in lines if len(fields) >= least_fields]


def check_program(root: Path, process: Mapping[str, Any]) -> None:
    """Raise ProgramNotFoundError or NotExecutableError where exec would fail.

    Runtimes say it in their own words and with codes of their own. What only exec can find out is left to them.
    """
    name = process["args"][0]
    denied = False
    for candidate in _candidates(name, process):
        try:
            path = inside(root, candidate)
            mode = path.stat().st_mode
        except OSError:
            continue
        if not stat.S_ISREG(mode) or mode & 0o111 == 0:
            denied = True
            continue
        interpreter = _interpreter(path)
        if interpreter and not _exists(root, interpreter):
            raise ProgramNotFoundError(f"{name}: its interpreter {interpreter} is not in the image")
        return
    if denied:
        raise NotExecutableError(f"{name} is no executable file")
    raise ProgramNotFoundError(f"{name} is not in the image")


def _candidates(name: str, process: Mapping[str, Any]) -> list[PurePosixPath]:
    if "/" in name:
        return [PurePosixPath(process["cwd"]) / name]
    path = next((e.removeprefix("PATH=") for e in process["env"] if e.startswith("PATH=")), _PATH)
    return [PurePosixPath(process["cwd"]) / part / name for part in path.split(":") if part]


def _interpreter(path: Path) -> str:
    """The program that a script's first line names; execve(2) reads at most 255 bytes of it."""
    with path.open("rb") as file:
        head = file.read(256)
    line = head.partition(b"\n")[0]
    if not line.startswith(b"#!") or b"\0" in line:
        return ""
    words = line[2:].split()
    return os.fsdecode(words[0]) if words else ""


def _exists(root: Path, path: str) -> bool:
    try:
        return inside(root, path).exists()
    except OSError:
        return False


def make_directory(root: Path, path: str) -> None:
    """Make a directory of the image where it is missing. UsageError when something else is in its place."""
    try:
        inside(root, path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be a directory of the image: {error.strerror}") from None


def host_volumes() -> list[Volume]:
    """Files of the host that a command on the host's network needs."""
    return [Volume(path, path, read_only=True) for path in _HOST_FILES if Path(path).is_file()]


def runtime_config(root: Path, process: Mapping[str, Any], command: Command) -> dict[str, Any]:
    """config.json of an OCI runtime bundle. The network is the host's: a training job needs its fabric."""
    plain = ["nosuid", "noexec", "nodev"]
    mounts: list[dict[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc", "options": plain},
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
        # No size: data loaders pass batches through it, and half of the memory is the kernel's default.
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": [*plain, "mode=1777"]},
        {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": plain},
        {"destination": "/sys", "type": "none", "source": "/sys", "options": ["rbind", *plain, "ro"]},
    ]
    for volume in [*host_volumes(), *command.volumes]:
        options = ["rbind", "ro" if volume.read_only else "rw"]
        mounts.append(
            {"destination": volume.target, "type": "none", "source": volume.source, "options": options}
        )
    return {
        "ociVersion": "1.0.2",
        "process": dict(process),
        "root": {"path": str(root), "readonly": False},
        "hostname": command.host_name,
        "mounts": mounts,
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")],
            "resources": {"devices": [{"allow": True, "access": "rwm"}]},
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list"],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sysrq-trigger"],
        },
    }
