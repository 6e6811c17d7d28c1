"""The routes of ``/v1`` (records: ``bootseer.core.wire``)."""

from __future__ import annotations

from bootseer.core import errors, wire
from bootseer.daemon.http import MethodNotAllowedError, Request
from bootseer.daemon.supervisor import Supervisor


class Api:
    """Translates requests into calls of the supervisor."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    async def handle(self, request: Request) -> tuple[int, object]:
        """Route one request; returns status and record."""
        match [part for part in request.path.split("/") if part], request.method:
            case ["v1", "status"], "GET":
                return 200, await self._supervisor.status()
            case ["v1", "mounts"], "GET":
                return 200, self._supervisor.mounts()
            case ["v1", "mounts"], "POST":
                return 201, await self._supervisor.mount(wire.decode(request.body, wire.MountRequest))
            case ["v1", "mounts", mount_id], "GET":
                return 200, self._supervisor.get(mount_id)
            case ["v1", "mounts", mount_id], "DELETE":
                lazy = request.query.get("lazy", "0") in {"1", "true"}
                return 200, await self._supervisor.unmount(mount_id, lazy=lazy)
            case ["v1", "mounts", mount_id, "statistics"], "GET":
                return 200, await self._supervisor.statistics(mount_id)
            case ["v1", "mounts", mount_id, ("ready" | "prefetch") as op], "POST":
                return 200, await self._supervisor.tell(mount_id, op)
            case (
                (
                    ["v1", "status" | "mounts"]
                    | ["v1", "mounts", _]
                    | ["v1", "mounts", _, "statistics" | "ready" | "prefetch"]
                ),
                method,
            ):
                raise MethodNotAllowedError(f"{method} does not work on {request.path}")
            case _:
                raise errors.NotFoundError(f"there is no {request.path}", hint="the API lives under /v1")
