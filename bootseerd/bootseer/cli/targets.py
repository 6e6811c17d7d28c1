"""What a user may name an image or a mount by."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli.client import Client
from bootseer.cli.output import absolute
from bootseer.core import paths, wire
from bootseer.core.errors import DaemonUnreachableError

if TYPE_CHECKING:
    from bootseer.image.resolve import ResolvedImage

Target = Annotated[str, typer.Argument(help="An image reference; or a mount's id or directory.")]

MOUNT_LABEL = "mount:"  # what follows is the directory that the user named


def node_state_dir(client: Client, *, needed: bool = True) -> Path:
    """The daemon's; without a daemon, where ``needed`` is false, the usual one."""
    try:
        return Path(client.status().state_dir)
    except DaemonUnreachableError:
        if needed:
            raise
        return paths.state_dir()


def image_of(client: Client, target: str, state_dir: Path) -> ResolvedImage:
    """An image by reference, or that of a mount: then exactly the one that is mounted."""
    from bootseer.image.reference import Reference as ImageReference
    from bootseer.image.reference import parse
    from bootseer.image.resolve import resolve

    found = lookup(client, target, needed=False)
    if found is None:
        return resolve(absolute(target), state_dir=state_dir if state_dir.is_dir() else None)
    pinned = ImageReference(parse(found.image).location, digest=found.digest)
    return resolve(str(pinned), state_dir=state_dir)


def lookup(client: Client, target: str, *, needed: bool = True) -> wire.Mount | None:
    """The mount that a user means by an id or a directory, the newest first."""
    try:
        mounts = client.mounts()
    except DaemonUnreachableError:
        if needed:
            raise
        return None
    places = {str(Path(target).absolute()), str(Path(target).resolve())}
    for found in reversed(mounts):
        if target == found.id or places & {found.label.removeprefix(MOUNT_LABEL), found.fuse_mountpoint}:
            return found
    return None
