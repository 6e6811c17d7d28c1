"""Which setting wins, and what a wrong one is told to be."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.core import config, paths
from bootseer.core.config import Config, load
from bootseer.core.errors import ConfigError

FILE = """
socket = "/file/socket"
run_dir = "/file/run"
state_dir = "/file/state"
log_level = "ERROR"
"""


@pytest.fixture(autouse=True)
def system_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the file in /etc, and is not there."""
    path = tmp_path / "etc" / "bootseer.toml"
    monkeypatch.setattr(config, "SYSTEM_PATH", path)
    for name in ("CONFIG", "SOCKET", "RUN_DIR", "STATE_DIR", "LOG_LEVEL"):
        monkeypatch.delenv(f"BOOTSEER_{name}", raising=False)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "bootseer.toml"
    path.write_text(FILE)
    return path


def test_defaults() -> None:
    assert load(environment={}) == Config()
    assert Config() == Config(
        socket="/run/bootseer/bootseerd.sock", run_dir=None, state_dir="/var/lib/bootseer", log_level="INFO"
    )


def test_flags_over_environment_over_file(file: Path) -> None:
    environment = {"BOOTSEER_SOCKET": "/env/socket", "BOOTSEER_RUN_DIR": "/env/run", "BOOTSEER_LOG_LEVEL": ""}
    flags = {"socket": "/flag/socket", "run_dir": None}
    assert load(file, flags=flags, environment=environment) == Config(
        socket="/flag/socket", run_dir="/env/run", state_dir="/file/state", log_level="ERROR"
    )


def test_sections(file: Path) -> None:
    file.write_text("[cache]\nmax_bytes = 5\nmin_free_bytes = 6\n[record]\nidle_s = 7\n")
    environment = {"BOOTSEER_CACHE_MAX_BYTES": "8", "BOOTSEER_REGISTRY_CONFIG_PATH": "/certs"}
    found = load(file, environment=environment)
    assert (found.cache.max_bytes, found.cache.min_free_bytes) == (8, 6)
    assert found.record == config.Record(idle_s=7.0)
    assert found.registry.config_path == "/certs"


@pytest.mark.parametrize("value", ["many", "-1", "1.5"])
def test_a_number_that_is_none(value: str) -> None:
    with pytest.raises(ConfigError, match="BOOTSEER_CACHE_MAX_BYTES: "):
        load(environment={"BOOTSEER_CACHE_MAX_BYTES": value})


def test_a_number_in_the_file_is_no_text(file: Path) -> None:
    file.write_text('cache.max_bytes = "5"')
    with pytest.raises(ConfigError, match=r"cache\.max_bytes: Expected `int`"):
        load(file, environment={})


def test_which_file(file: Path, system_path: Path) -> None:
    system_path.parent.mkdir()
    system_path.write_text('state_dir = "/system"')
    other = file.with_name("other.toml")
    other.write_text('state_dir = "/other"')
    variable = {"BOOTSEER_CONFIG": str(other)}
    assert load(file, environment=variable).state_dir == "/file/state"
    assert load(environment=variable).state_dir == "/other"
    assert load(environment={"BOOTSEER_CONFIG": ""}).state_dir == "/system"


@pytest.mark.parametrize("by_variable", [False, True])
def test_a_file_that_was_named_must_exist(tmp_path: Path, by_variable: bool) -> None:
    missing = tmp_path / "missing.toml"
    with pytest.raises(ConfigError, match=r"missing\.toml: No such file"):
        if by_variable:
            load(environment={"BOOTSEER_CONFIG": str(missing)})
        else:
            load(missing, environment={})


def test_all_mistakes_at_once(file: Path) -> None:
    file.write_text(
        'socket = 5\nstate_dir = ""\nrun_dir = "a\\u0000b"\nsokcet = "/a"\ncache = 1\n[record]\nidle_s = 0\nidle = 1\n'
    )
    with pytest.raises(ConfigError) as caught:
        load(file, flags={"run_dir": ""}, environment={"BOOTSEER_LOG_LEVEL": "LOUD"})
    message = caught.value.message
    for where in [
        f"{file}, {key}:"
        for key in ("socket", "state_dir", "run_dir", "'sokcet'", "'cache'", "record.idle_s", "'record.idle'")
    ]:
        assert where in message
    assert "BOOTSEER_LOG_LEVEL: Invalid enum value 'LOUD'" in message
    assert "--run-dir: Expected `str` of length >= 1" in message
    assert "\n" not in message
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(
        "settings are socket, run_dir, state_dir, log_level, cache.max_bytes, "
    )
    assert caught.value.exit_code == 78


@pytest.mark.parametrize("data", [b"socket", b"a = 1\na = 2", b"\xff", b"a = " + b"[" * 5000, b"[a\n"])
def test_a_file_that_is_no_toml(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load(file, environment={})
    assert caught.value.message.startswith(f"{file}: ")
    assert "\n" not in caught.value.message


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path, environment={})


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3))
def test_whatever_the_file_says(values: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "bootseer.toml"
        # JSON's strings are TOML's, but for DEL and the escape of what is beyond the first plane.
        lines = [f"{quoted(key)} = {quoted(value)}\n" for key, value in values.items()]
        file.write_text("".join(lines))
        with pytest.raises(ConfigError) if values else contextlib.nullcontext() as caught:
            load(file, environment={})
        if caught is not None:
            assert caught.value.message.count("there is no such setting") == len(values)
            assert len(caught.value.message.splitlines()) == 1


def test_paths_follow_the_file(system_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (paths.socket_path(), paths.state_dir()) == (Path(Config().socket), Path(Config().state_dir))
    system_path.parent.mkdir()
    system_path.write_text(FILE)
    assert (paths.socket_path(), paths.state_dir()) == (Path("/file/socket"), Path("/file/state"))
    monkeypatch.setenv("BOOTSEER_SOCKET", "/env/socket")
    assert paths.socket_path() == Path("/env/socket")
    system_path.write_text("nonsense")
    assert paths.state_dir() == Path(Config().state_dir)
