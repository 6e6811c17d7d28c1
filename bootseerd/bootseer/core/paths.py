"""Where things are on a node, unless the environment or a flag says otherwise."""

from __future__ import annotations

import os
from pathlib import Path


def socket_path() -> Path:
    """The daemon's API socket (``BOOTSEER_SOCKET``)."""
    return Path(os.environ.get("BOOTSEER_SOCKET", "/run/bootseer/bootseerd.sock"))


def state_dir() -> Path:
    """Cache, images' metadata and traces (``BOOTSEER_STATE_DIR``)."""
    return Path(os.environ.get("BOOTSEER_STATE_DIR", "/var/lib/bootseer"))
