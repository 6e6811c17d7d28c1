"""Which errno a reader sees for which error of ours. The only place that decides."""

from __future__ import annotations

import errno

from bootseer.core import errors

_ERRNO: dict[type[errors.BootseerError], int] = {
    errors.NotFoundError: errno.ENOENT,
    errors.IntegrityError: errno.EIO,
    errors.BackendUnavailableError: errno.EIO,
    errors.TimeoutExpiredError: errno.ETIMEDOUT,
    errors.PermissionDeniedError: errno.EACCES,
    errors.UsageError: errno.EINVAL,
}


def to_errno(error: BaseException) -> int:
    """The errno for ``error``: an OSError keeps its own, whatever we do not know is EIO."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    for kind in type(error).__mro__:
        if kind in _ERRNO:
            return _ERRNO[kind]
    return errno.EIO
