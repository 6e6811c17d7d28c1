"""Codes and exit codes are a contract with scripts: they are written out here, not computed."""

from __future__ import annotations

import pytest

from bootseer.core import errors

CONTRACT = {
    errors.UsageError: ("usage", 2),
    errors.DaemonUnreachableError: ("daemon_unreachable", 3),
    errors.NotFoundError: ("not_found", 4),
    errors.IntegrityError: ("integrity", 5),
    errors.TimeoutExpiredError: ("timeout", 6),
    errors.BackendUnavailableError: ("backend_unavailable", 69),
    errors.PermissionDeniedError: ("permission", 77),
    errors.ConfigError: ("config", 78),
    errors.InternalError: ("internal", 1),
}


@pytest.mark.parametrize(("kind", "contract"), CONTRACT.items(), ids=str)
def test_codes_are_stable(kind: type[errors.BootseerError], contract: tuple[str, int]) -> None:
    assert (kind.code, kind.exit_code) == contract


def test_every_error_is_in_the_contract() -> None:
    assert set(errors.BootseerError.__subclasses__()) >= set(CONTRACT)
    ours = {kind for kind in errors.BootseerError.__subclasses__() if kind.__module__ == errors.__name__}
    assert ours == set(CONTRACT)


@pytest.mark.parametrize("kind", CONTRACT)
def test_an_error_survives_a_socket(kind: type[errors.BootseerError]) -> None:
    error = errors.from_code(kind.code, "what happened", "what to do")
    assert type(error) is kind
    assert (error.message, error.hint, str(error)) == ("what happened", "what to do", "what happened")


def test_a_code_from_a_newer_version_is_still_an_error_of_ours() -> None:
    error = errors.from_code("from_the_future", "what happened")
    assert type(error) is errors.BootseerError
    assert error.exit_code == 1
    assert error.hint is None
