"""Every error a user can meet, with its stable code (JSON) and exit code (shell).

Only adapters convert: FUSE operations to errno (``bootseer.fusefs.errno_map``), the API to a status and a
``{code, message, hint}`` object, the CLI to an exit code and one line.
"""

from __future__ import annotations

from typing import ClassVar


class BootseerError(Exception):
    """Base of all errors that bootseer raises on purpose.

    ``message`` is one line without a trailing full stop; ``hint`` says what the user can do about it.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(BootseerError):
    """The arguments cannot be what the user meant."""

    code = "usage"
    exit_code = 2


class DaemonUnreachableError(BootseerError):
    """No bootseerd answers on its socket."""

    code = "daemon_unreachable"
    exit_code = 3


class NotFoundError(BootseerError):
    """The image, mount, trace or file asked for does not exist."""

    code = "not_found"
    exit_code = 4


class IntegrityError(BootseerError):
    """Bytes do not match their digest, or a format is malformed."""

    code = "integrity"
    exit_code = 5


class TimeoutExpiredError(BootseerError):
    """A deadline passed."""

    code = "timeout"
    exit_code = 6


class BackendUnavailableError(BootseerError):
    """The origin cannot be reached, refuses, or answers wrongly."""

    code = "backend_unavailable"
    exit_code = 69


class PermissionDeniedError(BootseerError):
    """The user may not do this."""

    code = "permission"
    exit_code = 77


class ConfigError(BootseerError):
    """The configuration is wrong."""

    code = "config"
    exit_code = 78


class InternalError(BootseerError):
    """Our bug."""

    code = "internal"
    exit_code = 1


_BY_CODE: dict[str, type[BootseerError]] = {
    cls.code: cls
    for cls in (
        UsageError,
        DaemonUnreachableError,
        NotFoundError,
        IntegrityError,
        TimeoutExpiredError,
        BackendUnavailableError,
        PermissionDeniedError,
        ConfigError,
        InternalError,
    )
}


def from_code(code: str, message: str, hint: str | None = None) -> BootseerError:
    """Rebuild the error that travelled over a socket as ``{code, message, hint}``."""
    return _BY_CODE.get(code, BootseerError)(message, hint=hint)
