"""``bootseer``: the command line of a node."""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from bootseer.cli import image_cmd, run_cmd, status_cmd
from bootseer.cli.client import Client
from bootseer.cli.output import Json, fail, say
from bootseer.core import paths
from bootseer.core.errors import (
    BootseerError,
    InternalError,
    NotFoundError,
    PermissionDeniedError,
    UsageError,
)

EPILOG = (
    "Exit codes: 0 ok, 1 failure, 2 usage, 3 daemon unreachable, 4 not found, 5 integrity, 6 timeout, "
    "69 backend unavailable, 77 permission, 78 configuration, 130 interrupted. `image run` exits with the code of the "
    "command, or 125 runtime failed, 126 command not executable, 127 command not found."
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=EPILOG,
    help="Start training images fast, and say why a start was slow.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(image_cmd.app, name="image", epilog=EPILOG)
image_cmd.app.command(context_settings={"allow_interspersed_args": False}, epilog=EPILOG)(run_cmd.run)
app.command("status", epilog=EPILOG)(status_cmd.status)


@app.command("doctor", epilog=EPILOG)
def doctor(context: typer.Context, as_json: Json = False) -> int:
    """Check kernel features, runtimes, disk and daemon. Exit code 1 when something fails."""
    from bootseer.cli import doctor_cmd  # what it needs, no other verb does

    return doctor_cmd.doctor(context.obj, as_json=as_json)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"bootseer {version('bootseer')}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    socket: Annotated[
        Path, typer.Option(envvar="BOOTSEER_SOCKET", help="The daemon's API socket.")
    ] = paths.socket_path(),  # noqa: B008  (typer shows the default)
    _show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of every verb."""
    context.obj = Client(socket)


def main() -> None:
    """Entry point: every error becomes one line and an exit code."""
    gc.disable()  # a verb is short and makes little; collecting costs a tenth of its start
    _usable_streams()
    sys.exit(_run())


def _run() -> int:
    try:
        result = app(standalone_mode=False)
        sys.stdout.flush()  # here, where a full disk or a closed pipe can still be told
        return result if isinstance(result, int) else 0
    except BootseerError as error:
        return fail(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (BrokenPipeError, SystemExit):  # the latter is what typer makes of the former
        _give_up_stdout()
        return 128 + signal.SIGPIPE
    except OSError as error:
        _give_up_stdout()
        return fail(_explained(error))
    except Exception as error:
        # The usage errors of typer's own copy of click, which it does not export.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            if type(error).__name__ != "NoArgsIsHelpError":
                say(error.format_message())
            else:
                error.show()  # type: ignore[attr-defined]
            return int(error.exit_code)
        if type(error).__name__ == "Abort":
            return 128 + signal.SIGINT
        raise


def _give_up_stdout() -> None:
    """If it is broken: the interpreter flushes it once more at its end, and would complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _explained(error: OSError) -> BootseerError:
    what = error.strerror or str(error)
    message = f"{error.filename}: {what}" if error.filename else what
    match error.errno:
        case errno.EPERM | errno.EACCES:
            return PermissionDeniedError(message, hint="run it as a user who may")
        case errno.ENOENT:
            return NotFoundError(message)
        case errno.ENOTDIR | errno.EISDIR | errno.EEXIST | errno.ENAMETOOLONG | errno.ELOOP | errno.EROFS:
            return UsageError(message)
    return InternalError(message)


def _usable_streams() -> None:
    """Closed ones must not break us, nor file names that are no UTF-8."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123  (for good)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
