"""Image references: ``DIR``, ``DIR:TAG``, ``DIR@sha256:…``, and the same with ``http(s)://HOST/PREFIX``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from bootseer.core.errors import UsageError

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_LIKE_DIGEST = re.compile(r"(?i:sha\d+):[^/]*$")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Reference:
    """``location`` is a directory or a URL; at most one of ``tag`` and ``digest`` is set."""

    location: str
    tag: str | None = None
    digest: str | None = None

    @property
    def is_remote(self) -> bool:
        """Whether a network is needed."""
        return self.location.startswith(("http://", "https://"))

    def __str__(self) -> str:
        if self.digest:
            return f"{self.location}@{self.digest}"
        return f"{self.location}:{self.tag}" if self.tag else self.location


def parse(text: str) -> Reference:
    """Parse a reference; UsageError says what is wrong with it."""
    if not text:
        raise UsageError("an image reference is empty")
    if "\0" in text:
        raise UsageError("an image reference holds a NUL byte")
    if _exists(text):  # whatever its name looks like
        return Reference(text)
    location, at, digest = text.rpartition("@")
    if at and _LIKE_DIGEST.match(digest):  # else an @ of a path, or of a user in a URL
        if not location or not _DIGEST.fullmatch(digest):
            raise UsageError(f"{text[:200]!r} has no valid digest", hint="DIR@sha256: and 64 hex digits")
        return Reference(location, digest=digest)
    # The last colon separates a tag only when it belongs to the last path component, not to scheme or port.
    head, colon, tail = text.rpartition(":")
    path_start = text.find("/", text.find("://") + 3) if "://" in text else 0
    if colon and "/" not in tail and len(head) > path_start >= 0:
        return Reference(head, tag=check_tag(tail))
    return Reference(text)


def _exists(location: str) -> bool:
    try:
        return Path(location).exists()
    except OSError:  # too long, not to be looked at
        return False


def check_tag(tag: str) -> str:
    """Return ``tag``; UsageError when it cannot be one."""
    if not _TAG.fullmatch(tag):
        raise UsageError(f"{tag!r} is not a tag", hint="letters, digits, '.', '_' and '-', at most 128")
    return tag
