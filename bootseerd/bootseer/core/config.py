"""Settings of a node: flags over environment over one TOML file over what is built in.

The file is the one that ``--config`` or ``BOOTSEER_CONFIG`` names, which must exist, else
``/etc/bootseer/bootseer.toml`` if it does. A key that is not known is an error, and all errors are told at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from bootseer.core.errors import ConfigError

SYSTEM_PATH = Path("/etc/bootseer/bootseer.toml")
FILE_VARIABLE = "BOOTSEER_CONFIG"

_Path = Annotated[str, msgspec.Meta(min_length=1, pattern=r"^[^\0]*$")]


class Config(msgspec.Struct, kw_only=True, frozen=True):
    """The keys of the file. In the environment they are ``BOOTSEER_SOCKET`` and so on; an empty variable is unset."""

    socket: _Path = "/run/bootseer/bootseerd.sock"
    run_dir: _Path | None = None  # beside the socket
    state_dir: _Path = "/var/lib/bootseer"
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


def load(
    path: Path | None = None,
    *,
    flags: Mapping[str, str | None] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Config:
    """Read and check everything; ConfigError with one line that names each mistake and where it is.

    ``flags``: key → value, ``None`` where the flag was not given.
    """
    known = {field.name: field.type for field in msgspec.structs.fields(Config)}
    values: dict[str, Any] = {}
    mistakes: list[str] = []

    def take(where: str, key: str, value: object) -> None:
        if key not in known:
            mistakes.append(f"{where}: there is no such setting")
            return
        try:
            values[key] = msgspec.convert(value, known[key])
        except msgspec.ValidationError as error:
            mistakes.append(f"{where}: {error}")

    file = path or (Path(environment[FILE_VARIABLE]) if environment.get(FILE_VARIABLE) else None)
    for key, value in _read(file or SYSTEM_PATH, optional=file is None).items():
        name = key if key in known else repr(key)  # a quoted key may hold anything, line ends too
        take(f"{file or SYSTEM_PATH}, {name}", key, value)
    for key in known:
        variable = f"BOOTSEER_{key.upper()}"
        if environment.get(variable):
            take(variable, key, environment[variable])
    for key, value in (flags or {}).items():
        if value is not None:
            take(f"--{key.replace('_', '-')}", key, value)
    if mistakes:
        raise ConfigError("; ".join(mistakes), hint=f"settings are {', '.join(known)}")
    return Config(**values)


def _read(path: Path, *, optional: bool) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        if optional and isinstance(error, FileNotFoundError | NotADirectoryError):
            return {}
        raise ConfigError(f"{path}: {error.strerror}") from None
    import tomllib  # most nodes have no file, and a verb of the CLI should start at once

    try:
        return tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
