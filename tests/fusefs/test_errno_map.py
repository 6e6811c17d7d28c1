"""The table from errors to errno, written out."""

from __future__ import annotations

import errno

import pytest

from bootseer.core import errors
from bootseer.fusefs.errno_map import to_errno


class _SubError(errors.NotFoundError):
    pass


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (errors.NotFoundError("x"), errno.ENOENT),
        (errors.IntegrityError("x"), errno.EIO),
        (errors.BackendUnavailableError("x"), errno.EIO),
        (errors.TimeoutExpiredError("x"), errno.ETIMEDOUT),
        (errors.PermissionDeniedError("x"), errno.EACCES),
        (errors.UsageError("x"), errno.EINVAL),
        (errors.InternalError("x"), errno.EIO),
        (errors.ConfigError("x"), errno.EIO),
        (errors.BootseerError("x"), errno.EIO),
        (_SubError("x"), errno.ENOENT),
        (OSError(errno.ENOSPC, "full"), errno.ENOSPC),
        (FileNotFoundError(errno.ENOENT, "gone"), errno.ENOENT),
        (OSError("no number"), errno.EIO),
        (TimeoutError(), errno.EIO),
        (ValueError("ours"), errno.EIO),
    ],
    ids=repr,
)
def test_errno(error: Exception, number: int) -> None:
    assert to_errno(error) == number
