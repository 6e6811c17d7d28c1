"""``bootseer status``."""

from __future__ import annotations

from typing import Annotated

import typer

from bootseer.cli.client import Client
from bootseer.cli.output import emit, emit_json, fields, table


def status(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """The daemon, its mounts and what it had to do without."""
    client: Client = context.obj
    record = client.status()
    if as_json:
        emit_json(record)
        return
    fields(
        [
            ("version", f"{record.version} (API {record.api_version})"),
            ("daemon", f"pid {record.pid}, up {record.uptime_s:.0f} s, kernel {record.kernel}"),
            ("state", record.state_dir),
            ("fallbacks", ", ".join(f"{why}: {n}" for why, n in record.fallbacks.items()) or "none"),
        ]
    )
    emit("")
    table(
        ("MOUNT", "STATE", "IMAGE", "WORKER", "RESTARTS", "ERROR"),
        [(m.id, m.state, m.image, m.worker_pid, m.restarts, m.error or "-") for m in record.mounts],
    )
