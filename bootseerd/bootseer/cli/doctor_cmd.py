"""``bootseer doctor``: what this machine can do, and what to do about what it cannot.

Where a user may, the checks do the thing itself, in a mount namespace of their own: what a kernel's version promises
may be configured away, or forbidden in a container.
"""

from __future__ import annotations

import gzip
import os
import platform
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from bootseer.cli.client import Client
from bootseer.cli.output import emit_json, table
from bootseer.core import paths, wire
from bootseer.core.errors import BootseerError

Level = Literal["ok", "warn", "fail"]

_LOW_BYTES, _FULL_BYTES = 5_000_000_000, 200_000_000


class Finding(msgspec.Struct):
    """One check."""

    check: str
    level: Level
    detail: str
    hint: str = ""


def doctor(client: Client, *, as_json: bool) -> int:
    """All checks; returns the exit code, 1 when something fails."""
    status, daemon = _daemon(client)
    may_mount = os.geteuid() == 0
    if may_mount:
        from bootseer.image.runtime import private_mounts

        try:
            private_mounts()
        except BootseerError as error:
            may_mount = False
            findings = [Finding("mounting", "fail", error.message, error.hint or "")]
        else:
            findings = [Finding("mounting", "ok", "this user may mount")]
    else:
        findings = [
            Finding("mounting", "fail", "this user may not mount", "run bootseerd and image run as root")
        ]
    findings += [_kernel(), _fuse(), _erofs(), _erofs_on_file(may_mount), _loop(), _overlay(may_mount)]
    findings += [_passthrough(), _resend(), *_runtimes(may_mount)]
    findings += [_disk(Path(status.state_dir) if status else paths.state_dir()), daemon]
    if as_json:
        emit_json({"ok": not _failed(findings), "findings": findings})
    else:
        table(
            ("CHECK", "RESULT", "DETAIL", "HINT"),
            [(f.check, f.level, f.detail, f.hint or "-") for f in findings],
        )
    return 1 if _failed(findings) else 0


def _failed(findings: list[Finding]) -> bool:
    return any(finding.level == "fail" for finding in findings)


def kernel_version(release: str) -> tuple[int, int]:
    """(6, 18) of ``6.18.4-foo``; (0, 0) of what is no release."""
    major, _, rest = release.partition(".")
    digits = ""
    for character in rest:
        if not character.isdecimal():
            break
        digits += character
    return (int(major), int(digits)) if major.isdecimal() and digits else (0, 0)


def _is_at_least(*version: int) -> bool:
    return kernel_version(platform.release()) >= version


def _kernel() -> Finding:
    detail = platform.release()
    if _is_at_least(6, 12):
        return Finding("kernel", "ok", detail)
    if _is_at_least(5, 4):
        return Finding("kernel", "warn", detail, "from Linux 6.12 on, starts are faster")
    return Finding("kernel", "fail", detail, "Linux 5.4 is the oldest with EROFS")


def _fuse() -> Finding:
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        hint = (
            "modprobe fuse"
            if isinstance(error, FileNotFoundError)
            else "allow this user or container to open it"
        )
        return Finding("fuse", "fail", f"/dev/fuse: {error.strerror}", hint)
    return Finding("fuse", "ok", "/dev/fuse")


def file_systems(path: Path = Path("/proc/filesystems")) -> set[str]:
    """Those that the kernel has loaded."""
    return {line.split()[-1] for line in path.read_text().splitlines() if line.strip()}


def _has_module(name: str) -> bool:
    modules = Path("/lib/modules") / platform.release() / "modules.dep"
    with suppress(OSError):
        return f"/{name}.ko" in modules.read_text()
    return False


def _erofs() -> Finding:
    if "erofs" in file_systems() or _has_module("erofs"):
        return Finding("erofs", "ok", "the kernel has it")
    return Finding("erofs", "fail", "this kernel has no EROFS", "a kernel with CONFIG_EROFS_FS")


def _erofs_on_file(may_mount: bool) -> Finding:
    name = "erofs on a file"

    def slower(why: str) -> Finding:
        return Finding(name, "warn", f"{why}: by a loop device", "Linux 6.12 or newer")

    if not may_mount:
        if _is_at_least(6, 12):
            return Finding(name, "ok", "by the kernel's version (not tried)")
        return slower("not before Linux 6.12")
    from bootseer import native
    from bootseer.image.runtime import temporary_work_dir

    with temporary_work_dir() as work_dir:
        for part in ("content", "mnt", "spool"):
            (work_dir / part).mkdir()
        (work_dir / "content/file").write_bytes(b"x" * 5000)
        image, mountpoint = str(work_dir / "image"), str(work_dir / "mnt")
        try:
            native.build_image(
                directory=str(work_dir / "content"), output_path=image, spool_dir=str(work_dir / "spool")
            )
            how = native.mount_erofs(image, mountpoint, by="file")
            native.umount(mountpoint)
        except OSError as error:
            return slower(error.strerror or str(error))
        except BootseerError as error:
            return slower(error.message)
    return Finding(name, "ok", f"tried: {how}")


def _loop() -> Finding:
    if Path("/dev/loop-control").exists():
        return Finding("loop", "ok", "/dev/loop-control")
    level: Level = "warn" if _is_at_least(6, 12) else "fail"
    return Finding("loop", level, "no loop devices", "modprobe loop")


def _overlay(may_mount: bool) -> Finding:
    if "overlay" not in file_systems() and not _has_module("overlay"):
        return Finding("overlay", "fail", "this kernel has no overlayfs", "modprobe overlay")
    if not may_mount:
        return Finding("overlay", "ok", "the kernel has it (not tried)")
    from bootseer.image.runtime import overlay, temporary_work_dir

    with temporary_work_dir() as work_dir:
        (work_dir / "lower").mkdir()
        try:
            with overlay(work_dir / "lower", work_dir) as root:
                (root / "file").touch()
        except BootseerError as error:
            return Finding("overlay", "fail", error.message, error.hint or "")
        except OSError as error:
            return Finding("overlay", "fail", str(error), "")
    return Finding("overlay", "ok", "tried")


def _passthrough() -> Finding:
    name = "fuse passthrough"
    if not _is_at_least(6, 9):
        return Finding(name, "warn", "not before Linux 6.9", "complete files are read through the daemon")
    if kernel_option("CONFIG_FUSE_PASSTHROUGH") is False:
        return Finding(
            name, "warn", "this kernel is built without it", "complete files are read through the daemon"
        )
    return Finding(name, "ok", "the kernel has it")


def kernel_option(
    name: str,
    places: tuple[Path, ...] = (Path("/proc/config.gz"), Path(f"/boot/config-{platform.release()}")),
) -> bool | None:
    """Whether the kernel was built with an option; ``None`` where nobody can tell."""
    for place in places:
        try:
            data = place.read_bytes()
            text = (gzip.decompress(data) if place.suffix == ".gz" else data).decode(errors="replace")
        except (OSError, EOFError):
            continue
        return any(line in {f"{name}=y", f"{name}=m"} for line in text.splitlines())
    return None


def _resend() -> Finding:
    if _is_at_least(6, 9):
        return Finding("fuse resend", "ok", "a worker that dies is replaced without a journal")
    return Finding("fuse resend", "warn", "not before Linux 6.9", "requests in flight are journaled instead")


def _runtimes(may_mount: bool) -> list[Finding]:
    """Each is tried, whatever was remembered."""
    from bootseer.image.runtime import forget, probe

    findings = []
    for name in ("crun", "runc"):
        if shutil.which(name) is None:
            findings.append(Finding(name, "warn", "not installed", f"apt install {name}"))
        elif not may_mount:
            findings.append(Finding(name, "ok", "installed (not tried)"))
        else:
            found = probe(name)
            detail = f"creates a container in {found.start_s * 1000:.0f} ms" if found.works else found.why
            hint = "" if found.works else "`image run` takes another"
            findings.append(Finding(name, "ok" if found.works else "warn", detail, hint))
    if may_mount:
        with suppress(OSError):
            forget()
    return findings


def _disk(state_dir: Path) -> Finding:
    path = state_dir
    while not path.exists():
        path = path.parent
    free_bytes = shutil.disk_usage(path).free
    detail = f"{free_bytes / 1e9:.1f} GB free for {state_dir}"
    if free_bytes >= _LOW_BYTES:
        return Finding("disk", "ok", detail)
    level: Level = "warn" if free_bytes >= _FULL_BYTES else "fail"
    return Finding("disk", level, detail, "without a cache, chunks are fetched again and again")


def _daemon(client: Client) -> tuple[wire.Status | None, Finding]:
    try:
        record = client.status()
    except BootseerError as error:
        return None, Finding("daemon", "fail", error.message, error.hint or "")
    bad = [mount.id for mount in record.mounts if mount.state == "failed"]
    detail = f"pid {record.pid}, {len(record.mounts)} mounts"
    if bad:
        return record, Finding(
            "daemon", "warn", f"{detail}, failed: {', '.join(bad)}", "`bootseer image umount` them"
        )
    lacking = ", ".join(sorted(record.fallbacks))
    if lacking:
        return record, Finding(
            "daemon", "warn", f"{detail}, does without: {lacking}", "see `bootseer status`"
        )
    return record, Finding("daemon", "ok", detail)
