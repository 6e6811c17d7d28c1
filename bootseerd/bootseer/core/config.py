"""Settings of a node: flags over environment over one TOML file over what is built in.

The file is the one that ``--config`` or ``BOOTSEER_CONFIG`` names, which must exist, else
``/etc/bootseer/bootseer.toml`` if it does. A key that is not known is an error, and all errors are told at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from bootseer.core.errors import ConfigError

SYSTEM_PATH = Path("/etc/bootseer/bootseer.toml")
FILE_VARIABLE = "BOOTSEER_CONFIG"

_Path = Annotated[str, msgspec.Meta(min_length=1, pattern=r"^[^\0]*$")]


_Count = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Cache(msgspec.Struct, kw_only=True, frozen=True):
    """``[cache]``: chunks on the local disk."""

    max_bytes: _Count = 0  # no cap but the floor
    min_free_bytes: _Count | None = None  # of the file system; None: 5 %, at most 1 GiB
    scrub_days: Annotated[float, msgspec.Meta(ge=0)] = (
        7.0  # every chunk is verified once in this time; 0: never
    )


class Registry(msgspec.Struct, kw_only=True, frozen=True):
    """``[registry]``: how registries are reached."""

    config_path: _Path | None = None  # of hosts.toml files; None: containerd's, else docker's


class Record(msgspec.Struct, kw_only=True, frozen=True):
    """``[record]``: when a recording ends that no workload ends by saying that it is ready."""

    window_s: _Seconds = 120.0
    idle_s: _Seconds = 30.0  # without a chunk that is new


class Prefetch(msgspec.Struct, kw_only=True, frozen=True):
    """``[prefetch]``: what all mounts of the node together may use; 0: as measured."""

    bandwidth_bytes_per_s: _Count = 0
    concurrency: _Count = 0


class Config(msgspec.Struct, kw_only=True, frozen=True):
    """The keys of the file. In the environment they are ``BOOTSEER_SOCKET``, ``BOOTSEER_CACHE_MAX_BYTES`` and so on;
    an empty variable is unset."""

    socket: _Path = "/run/bootseer/bootseerd.sock"
    run_dir: _Path | None = None  # beside the socket
    state_dir: _Path = "/var/lib/bootseer"
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    cache: Cache = Cache()
    registry: Registry = Registry()
    record: Record = Record()
    prefetch: Prefetch = Prefetch()


_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "cache": Cache,
    "registry": Registry,
    "record": Record,
    "prefetch": Prefetch,
}


def _settings() -> dict[str, Any]:
    """The type of each setting; those of a section are called ``section.key``."""
    types = {
        field.name: field.type for field in msgspec.structs.fields(Config) if field.name not in _SECTIONS
    }
    for section, kind in _SECTIONS.items():
        types |= {f"{section}.{field.name}": field.type for field in msgspec.structs.fields(kind)}
    return types


def load(
    path: Path | None = None,
    *,
    flags: Mapping[str, str | None] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Config:
    """Read and check everything; ConfigError with one line that names each mistake and where it is.

    ``flags``: key → value, ``None`` where the flag was not given.
    """
    known = _settings()
    values: dict[str, Any] = {}
    mistakes: list[str] = []

    def take(where: str, key: str, value: object, *, text: bool = True) -> None:
        if key not in known:
            mistakes.append(f"{where}: there is no such setting")
            return
        try:
            values[key] = msgspec.convert(value, known[key], strict=not text)
        except msgspec.ValidationError as error:
            mistakes.append(f"{where}: {error}")

    file = path or (Path(environment[FILE_VARIABLE]) if environment.get(FILE_VARIABLE) else None)
    for key, value in _flat(_read(file or SYSTEM_PATH, optional=file is None)):
        name = key if key in known else repr(key)  # a quoted key may hold anything, line ends too
        take(f"{file or SYSTEM_PATH}, {name}", key, value, text=False)
    for key in known:
        variable = f"BOOTSEER_{key.upper().replace('.', '_')}"
        if environment.get(variable):
            take(variable, key, environment[variable])
    for key, value in (flags or {}).items():
        if value is not None:
            take(f"--{key.replace('_', '-')}", key, value)
    if mistakes:
        raise ConfigError("; ".join(mistakes), hint=f"settings are {', '.join(known)}")
    sections = {
        section: kind(
            **{
                key.partition(".")[2]: values.pop(key)
                for key in list(values)
                if key.startswith(f"{section}.")
            }
        )
        for section, kind in _SECTIONS.items()
    }
    return Config(**values, **sections)  # type: ignore[arg-type]


def _flat(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key in _SECTIONS and isinstance(value, dict):
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        else:
            yield key, value


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
