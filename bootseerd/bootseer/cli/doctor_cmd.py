"""``bootseer doctor``: what this machine can do, and what to do about what it cannot."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from bootseer.cli.client import Client
from bootseer.cli.output import emit_json, table
from bootseer.core import paths
from bootseer.core.errors import BootseerError

Level = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct):
    """One check."""

    check: str
    level: Level
    detail: str
    hint: str = ""


def doctor(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Check kernel features, runtimes, disk and daemon. Exit code 1 when something fails."""
    client: Client = context.obj
    findings = [check() for check in (_root, _fuse, _erofs, _overlay, _loop, _resume, _runtime, _disk)]
    findings.append(_daemon(client))
    if as_json:
        emit_json(findings)
    else:
        table(
            ("CHECK", "RESULT", "DETAIL", "HINT"),
            [(f.check, f.level, f.detail, f.hint or "-") for f in findings],
        )
    return 1 if any(finding.level == "fail" for finding in findings) else 0


def kernel_version(release: str) -> tuple[int, int]:
    """(6, 18) of ``6.18.4-foo``; (0, 0) of what is no release."""
    parts = release.split(".")
    try:
        return int(parts[0]), int("".join(c for c in parts[1] if c.isdigit()))
    except (ValueError, IndexError):
        return 0, 0


def _kernel() -> tuple[int, int]:
    return kernel_version(platform.release())


def _file_systems(path: Path = Path("/proc/filesystems")) -> set[str]:
    return {line.split()[-1] for line in path.read_text().splitlines() if line.strip()}


def _root() -> Finding:
    if os.geteuid() == 0:
        return Finding("root", "ok", "this user may mount")
    return Finding("root", "fail", "this user may not mount", "run bootseerd and image run as root")


def _fuse() -> Finding:
    if Path("/dev/fuse").exists():
        return Finding("fuse", "ok", "/dev/fuse")
    return Finding("fuse", "fail", "there is no /dev/fuse", "modprobe fuse")


def _erofs() -> Finding:
    if "erofs" not in _file_systems() and not _module("erofs"):
        return Finding("erofs", "fail", "this kernel has no EROFS", "a kernel with CONFIG_EROFS_FS")
    if _kernel() >= (6, 12):
        return Finding("erofs", "ok", "mounts directly on the FUSE file")
    return Finding("erofs", "warn", "needs a loop device before Linux 6.12", "a newer kernel starts faster")


def _module(name: str) -> bool:
    base = Path("/lib/modules") / platform.release()
    return any(base.rglob(f"{name}.ko*")) if base.exists() else False


def _overlay() -> Finding:
    if "overlay" in _file_systems() or _module("overlay"):
        return Finding("overlay", "ok", "overlayfs")
    return Finding("overlay", "fail", "this kernel has no overlayfs", "modprobe overlay")


def _loop() -> Finding:
    if Path("/dev/loop-control").exists():
        return Finding("loop", "ok", "/dev/loop-control")
    level: Level = "warn" if _kernel() >= (6, 12) else "fail"
    return Finding("loop", level, "no loop devices", "modprobe loop")


def _resume() -> Finding:
    if _kernel() >= (6, 9):
        return Finding("fuse resend", "ok", "the kernel sends requests again; passthrough is possible")
    return Finding("fuse resend", "warn", "before Linux 6.9: requests are journaled, no passthrough")


def _runtime() -> Finding:
    found = [name for name in ("runc", "crun") if shutil.which(name)]
    if found:
        return Finding("runtime", "ok", ", ".join(found))
    return Finding("runtime", "warn", "plain namespaces only", "apt install runc")


def _disk(least_free_bytes: int = 5_000_000_000) -> Finding:
    path = paths.state_dir()
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    detail = f"{free / 1e9:.1f} GB free for {paths.state_dir()}"
    if free >= least_free_bytes:
        return Finding("disk", "ok", detail)
    return Finding("disk", "warn", detail, "a full cache disk makes starts slow, not wrong")


def _daemon(client: Client) -> Finding:
    try:
        record = client.status()
    except BootseerError as error:
        return Finding("daemon", "fail", error.message, error.hint or "")
    return Finding("daemon", "ok", f"pid {record.pid}, {len(record.mounts)} mounts")
