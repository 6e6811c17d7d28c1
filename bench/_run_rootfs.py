"""A command in a plain root directory, with the overlay and the runtime that ``bootseer image run`` uses:
``python -m bench._run_rootfs DIR -- CMD…``. The full-copy alternative of ``cold_start``."""

from __future__ import annotations

import sys
from pathlib import Path

from bootseer.image import runtime


def main() -> int:
    """Run; returns the command's exit code."""
    root, separator, *argv = sys.argv[1:]
    if separator != "--" or not argv:
        sys.exit("usage: python -m bench._run_rootfs DIR -- CMD…")
    with runtime.temporary_work_dir() as work_dir, runtime.overlay(Path(root).absolute(), work_dir) as merged:
        return runtime.run(merged, {}, runtime.Command(argv=argv), runtime.choose("auto"), work_dir)


if __name__ == "__main__":
    sys.exit(main())
