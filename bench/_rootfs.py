"""The root file system that the demo and the benches start: Debian's CPython, numpy and CPU torch (1-2 GB).

Built once per checkout into ``build/bench`` from the machine's own apt and pip configuration; the requirement
can be overridden (``BOOTSEER_BENCH_REQUIREMENTS``), for instance to take another build of torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = os.environ.get("BOOTSEER_BENCH_REQUIREMENTS", "numpy torch==2.13.0").split()
BUILD_DIR = Path("build/bench")


def build(build_dir: Path = BUILD_DIR) -> Path:
    """Return the directory of the root file system, building it when it is not there yet (root only)."""
    rootfs = build_dir / "rootfs"
    stamp = build_dir / "rootfs.stamp"
    wanted = " ".join(REQUIREMENTS)
    if stamp.exists() and stamp.read_text() == wanted:
        return rootfs
    if os.geteuid() != 0:
        sys.exit("bench: building the root file system needs root (mmdebstrap)")
    build_dir.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(rootfs, ignore_errors=True)
    _say("building a root file system (Debian + Python + torch); once, a few minutes")
    log = build_dir / "rootfs.log"
    with log.open("wb") as output:
        _run(output, "mmdebstrap", "--variant=minbase", "--include=python3", "bookworm", str(rootfs))
        packages = rootfs / "usr/local/lib/python3.11/dist-packages"
        _run(
            output,
            *(
                sys.executable,
                "-m",
                "pip",
                "install",
                "--no-warn-script-location",
                "--disable-pip-version-check",
            ),
            *("--target", str(packages), *REQUIREMENTS),
        )
        for leftover in ("var/cache/apt", "var/lib/apt/lists"):
            shutil.rmtree(rootfs / leftover, ignore_errors=True)
    stamp.write_text(wanted)
    return rootfs


def layer_tar(build_dir: Path = BUILD_DIR) -> Path:
    """The same root file system as the tar.gz layer that a registry would hold."""
    rootfs = build(build_dir)
    layer = build_dir / "layer.tar.gz"
    stamp = build_dir / "rootfs.stamp"
    if not layer.exists() or layer.stat().st_mtime < stamp.stat().st_mtime:
        _say("packing the full-copy alternative (tar.gz)")
        partial = layer.with_suffix(".partial")
        subprocess.run(
            [
                "tar",
                "--numeric-owner",
                "--xattrs",
                "-C",
                str(rootfs),
                "-I",
                "gzip -6",
                "-cf",
                str(partial),
                ".",
            ],
            check=True,
        )
        partial.rename(layer)
    return layer


def _say(message: str) -> None:
    print(f"bench: {message}", file=sys.stderr, flush=True)


def _run(log: object, *command: str) -> None:
    result = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)  # type: ignore[call-overload]
    if result.returncode != 0:
        sys.exit(f"bench: {command[0]} failed with {result.returncode}, see {BUILD_DIR / 'rootfs.log'}")
