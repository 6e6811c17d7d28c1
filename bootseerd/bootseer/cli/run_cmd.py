"""``bootseer image run``: a command in an image that starts while it is being fetched."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli.client import Client
from bootseer.cli.output import Reference, absolute, emit_json_line, say
from bootseer.core import wire
from bootseer.core.errors import (
    BackendUnavailableError,
    BootseerError,
    IntegrityError,
    PermissionDeniedError,
    UsageError,
)

if TYPE_CHECKING:
    from bootseer.image.runtime import Command, Selection
    from bootseer.image.signals import Signals

RUN_LABEL = "run:"  # what follows names the process that a mount belongs to
_POLL_S = 0.02
_SILENCE_S = 1.0  # of waiting, before we say what for
_WRONG_BYTES = (
    "bad_frame",
    "digest",
)  # reasons of native's Fetcher for chunks that are not what they must be
_UNDO_TIMEOUT_S = 15.0


@dataclass
class _Options:
    """How to run, apart from what."""

    runtime: str
    wait_s: float
    upper: Path | None
    keep: bool


@dataclass
class _Report:
    """What ``--json`` prints; times are seconds since the start of the verb."""

    started: float = field(default_factory=time.monotonic)
    values: dict[str, object] = field(default_factory=dict)

    def mark(self, name: str) -> None:
        """Note the time of an event."""
        self.values[name] = round(time.monotonic() - self.started, 4)


def run(
    context: typer.Context,
    reference: Reference,
    command: Annotated[
        list[str] | None, typer.Argument(help="After --: the command; default: the image's.")
    ] = None,
    runtime: Annotated[
        str, typer.Option(help="auto, crun, runc or namespaces; auto takes the first that works here.")
    ] = "auto",
    prefetch: Annotated[bool, typer.Option(help="Prefetch hot chunks.")] = True,
    wait: Annotated[
        float, typer.Option(min=0, help="Let the prefetch finish first, for at most this many seconds.")
    ] = 0.0,
    record: Annotated[bool, typer.Option(help="Record first uses.")] = True,
    background_fill: Annotated[bool, typer.Option(help="Fetch cold chunks when idle.")] = True,
    env: Annotated[
        list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE, or NAME to pass ours on.")
    ] = None,
    workdir: Annotated[str, typer.Option("--workdir", "-w", help="Working directory in the image.")] = "",
    user: Annotated[str, typer.Option("--user", "-u", help="UID[:GID] or names of the image.")] = "",
    hostname: Annotated[str, typer.Option(help="Host name in the container (default: the host's).")] = "",
    volume: Annotated[list[str] | None, typer.Option("--volume", "-v", help="SRC:DST[:ro].")] = None,
    tty: Annotated[bool, typer.Option("--tty", "-t", help="Give the command a terminal of its own.")] = False,
    upper: Annotated[
        Path | None, typer.Option(help="Keep what the command writes in this directory; start from it.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep/--rm", help="Keep what the command writes, and say where.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One line of JSON on stderr after the command has ended.")
    ] = False,
) -> int:
    """Run a command in an image, on a writable overlay. Exits with the command's code.

    125: the runtime failed; 126: the command cannot be executed; 127: the image has no such command.
    """
    from bootseer.image.bundle import Command, Volume, check_runtime
    from bootseer.image.owner import owner
    from bootseer.image.signals import Interrupted, Signals

    if upper is not None and keep:
        raise UsageError("--upper keeps what is written already; leave --keep out")
    if tty and not sys.stdin.isatty():
        raise UsageError("--tty needs a terminal on standard input")
    check_runtime(runtime)
    wanted = Command(
        argv=command[1:] if command and command[0] == "--" else command or [],
        env=dict(_variable(entry) for entry in env or []),
        workdir=workdir,
        user=user,
        hostname=hostname,
        volumes=[Volume.parse(text) for text in volume or []],
        terminal=tty,
    )
    if os.geteuid() != 0:
        raise PermissionDeniedError("this user may not mount", hint="run it as root")
    request = wire.MountRequest(
        image=absolute(reference),
        prefetch=prefetch,
        record=record,
        background_fill=background_fill,
        label=RUN_LABEL + owner(),
    )
    client: Client = context.obj
    report = _Report()
    signals = Signals()
    signals.take_over()
    mounting = _Mounting(client, request)
    try:
        code = _run(
            client, mounting, wanted, _Options(runtime, wait, upper, keep), signals=signals, report=report
        )
    except Interrupted as interrupted:
        code = interrupted.exit_code
    finally:
        mounting.undo(signals)
        signals.ignore()
    if as_json:
        report.values["exit_code"] = code
        report.mark("ended_s")
        emit_json_line(report.values)
    _clear_abandoned(client)
    return code


def _variable(entry: str) -> tuple[str, str]:
    name, separator, value = entry.partition("=")
    if not name:
        raise UsageError(f"{entry!r} is not NAME=VALUE")
    if not separator and name not in os.environ:
        raise UsageError(f"{name} is not set here", hint="NAME passes a variable on, NAME=VALUE sets it")
    return name, value if separator else os.environ[name]


class _Mounting:
    """A mount that the daemon makes while we go on; undone in the end, whatever became of it."""

    def __init__(self, client: Client, request: wire.MountRequest) -> None:
        self._client = client
        self._made: wire.Mount | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._mount, args=(request,), daemon=True)
        self._thread.start()

    def _mount(self, request: wire.MountRequest) -> None:
        try:
            self._made = self._client.mount(request)
        except BaseException as error:
            self._error = error

    def wait(self, signals: Signals) -> wire.Mount:
        """The mount; raises what the daemon answered, or Interrupted."""
        with signals.interruptible():
            self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._made is not None
        return self._made

    def undo(self, signals: Signals) -> None:
        """Never raises: the command's exit code matters more."""
        from bootseer.image.signals import Interrupted

        self._thread.join(_SILENCE_S)
        if self._thread.is_alive():
            say("waiting for bootseerd, to undo the mount")
            try:
                with signals.interruptible():
                    self._thread.join()
            except Interrupted:
                say("the mount is left to the next `bootseer image run` to undo")
        if self._made is None:
            return
        try:
            Client(self._client.socket_path, _UNDO_TIMEOUT_S).unmount(self._made.id, lazy=True)
        except BootseerError as error:
            if error.code != "not_found":
                say(
                    f"mount {self._made.id} is left ({error.message}; `bootseer image umount {self._made.id}`)"
                )


def _run(
    client: Client,
    mounting: _Mounting,
    command: Command,
    options: _Options,
    *,
    signals: Signals,
    report: _Report,
) -> int:
    # These imports cost as much as the mount does; the daemon makes it meanwhile.
    from bootseer.image import runtime as runtimes

    selection = runtimes.select(options.runtime)
    made = mounting.wait(signals)
    report.values |= {"mount": made.id, "image": made.image, "digest": made.digest}
    report.mark("mounted_s")
    _say_skipped(selection)
    runtimes.private_mounts()
    fuse = Path(made.fuse_mountpoint)
    runtimes.detach_others(fuse, command.volumes)
    try:
        with runtimes.temporary_work_dir(keep=options.keep) as work_dir:
            try:
                with (
                    runtimes.mounted_erofs(made.image_path, work_dir / "image") as how,
                    runtimes.overlay(work_dir / "image", work_dir, keep_in=options.upper) as root,
                ):
                    _wait_for_plan(client, made.id, options.wait_s, signals)
                    report.values |= {"erofs": how, "skipped_runtimes": dict(selection.skipped)}
                    report.mark("started_s")
                    report.values["runtime"] = selection.name
                    code = runtimes.run(root, made.config, command, selection.name, work_dir, signals)
            except BackendUnavailableError as error:
                raise explained(error, client, made.id) from None
            if code != 0 and (reason := last_error(client, made.id)):
                say(f"reads of the image have failed: {reason}")
            if options.keep:
                say(f"what the command wrote is in {work_dir / 'upper'}")
            return code
    except runtimes.RuntimeFailedError:
        if options.runtime == "auto":
            runtimes.forget()  # it may have stopped working since it was tried
        raise
    finally:
        runtimes.unmount(fuse)  # our namespace's copy of it


def _say_skipped(selection: Selection) -> None:
    if selection.is_new:
        for name, why in selection.skipped.items():
            say(f"{name} does not work here, {selection.name} does: {why}")


def _wait_for_plan(client: Client, mount_id: str, longest_s: float, signals: Signals) -> None:
    deadline = time.monotonic() + longest_s
    with signals.interruptible():
        while time.monotonic() < deadline and not client.statistics(mount_id).get("file.plan_done", True):
            time.sleep(_POLL_S)


def last_error(client: Client, mount_id: str) -> str:
    """Why reads of a mount failed; empty when none did."""
    with suppress(BootseerError):
        values = client.statistics(mount_id)
        if values.get("file.errors"):
            return str(values.get("file.last_error", ""))
    return ""


def explained(error: BackendUnavailableError, client: Client, mount_id: str) -> BootseerError:
    """An image that cannot be read, with the reason that its worker knows."""
    reason = last_error(client, mount_id)
    kind = IntegrityError if reason.startswith(_WRONG_BYTES) else BackendUnavailableError
    return kind(error.message, hint=reason or error.hint)


def _clear_abandoned(client: Client) -> None:
    """Undo what earlier runs left that were killed outright."""
    from bootseer.image.owner import owner_is_gone
    from bootseer.image.runtime import remove_abandoned

    with suppress(BootseerError, OSError):
        for left in client.mounts():
            if left.label.startswith(RUN_LABEL) and owner_is_gone(left.label.removeprefix(RUN_LABEL)):
                client.unmount(left.id, lazy=True)
        remove_abandoned()
