"""From what a spec says about blobs to the native source that reads them."""

from __future__ import annotations

from collections.abc import Sequence

from bootseer import native
from bootseer.core.wire import BlobSource


def open_blobs(blobs: Sequence[BlobSource], *, connect_timeout_s: float = 10.0) -> native.Source:
    """One source for all blobs of an image. UsageError for an address that cannot be."""
    (blob,) = blobs
    endpoint = blob.endpoints[0]
    return native.open_source(
        endpoint.url,
        headers=endpoint.headers,
        connect_timeout_s=connect_timeout_s,
        ca_file=endpoint.ca_file or None,
    )
