"""A small root file system with a shell: the host's programs and the libraries that they need."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

_PROGRAMS = ("sh", "bash", "cat", "env", "hostname", "id", "ls", "sleep", "touch", "readlink", "sed", "true")


def make_rootfs(root: Path) -> Path:
    """A root file system of a few MB with users ``bob`` (1234:1235, also in group staff) and files to test with."""
    for name in ("bin", "etc", "tmp", "root", "home/bob", "work"):
        (root / name).mkdir(parents=True)
    for name in _PROGRAMS:
        program = shutil.which(name)
        assert program is not None, name
        shutil.copy(Path(program).resolve(), root / "bin" / name)
        for library in re.findall(r"(/\S+)", subprocess.check_output(["ldd", program], text=True)):
            target = root / library.removeprefix("/")
            if not target.exists() and Path(library).exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path(library).resolve(), target)
    (root / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nbob:x:1234:1235:Bob:/home/bob:/bin/sh\nbroken:x:many:1:::\nshort:x\n"
    )
    (root / "etc/group").write_text("root:x:0:\nstaff:x:50:bob,alice\nbob:x:1235:\nwheel:x:10:bob\n")
    os.chown(root / "home/bob", 1234, 1235)
    (root / "work/plain").write_text("no program\n")
    (root / "work/script").write_text("#!/bin/sh\necho script $1\n")
    (root / "work/orphan").write_text("#!/no/such/interpreter\n")
    for name in ("script", "orphan"):
        (root / "work" / name).chmod(0o755)
    (root / "work/link").symlink_to("/work/script")
    (root / "tmp").chmod(0o1777)
    return root
