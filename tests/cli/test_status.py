"""``bootseer status``."""

from __future__ import annotations

from tests.cli.conftest import Bootseer, FakeDaemon, make_mount, make_status

from bootseer.core import wire


def test_text(bootseer: Bootseer, fake: FakeDaemon) -> None:
    mount = make_mount(state="failed", error="its workers die", restarts=3)
    fake.answer("GET status", 200, make_status(mounts=[mount], fallbacks={"passthrough": 2}))
    outcome = bootseer("--socket", fake.socket_path, "status")
    assert outcome.code == 0
    assert "passthrough: 2" in outcome.out
    row = outcome.out.splitlines()[-1].split()
    assert row == ["abc123", "failed", "/images/app", "42", "3", "its", "workers", "die"]


def test_json(bootseer: Bootseer, fake: FakeDaemon) -> None:
    status = make_status(mounts=[make_mount()])
    fake.answer("GET status", 200, status)
    outcome = bootseer("--socket", fake.socket_path, "status", "--json")
    assert wire.decode(outcome.out.encode(), wire.Status) == status
