"""Where things are on a node, for those that talk to the daemon: environment, then configuration file, then default.

A configuration that is wrong is the daemon's to complain about: it does not start then, and a verb says that none
answers.
"""

from __future__ import annotations

import os
from pathlib import Path

from bootseer.core import config
from bootseer.core.errors import ConfigError


def socket_path() -> Path:
    """The daemon's API socket (``BOOTSEER_SOCKET``)."""
    return Path(os.environ.get("BOOTSEER_SOCKET") or _configured().socket)


def state_dir() -> Path:
    """Cache, images' metadata and traces (``BOOTSEER_STATE_DIR``)."""
    return Path(os.environ.get("BOOTSEER_STATE_DIR") or _configured().state_dir)


def _configured() -> config.Config:
    try:
        return config.load()
    except ConfigError:
        return config.Config()
