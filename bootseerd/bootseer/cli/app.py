"""``bootseer``: the command line of a node."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from bootseer.cli import doctor_cmd, image_cmd, status_cmd
from bootseer.cli.client import Client
from bootseer.cli.output import fail, say
from bootseer.core import paths
from bootseer.core.errors import BootseerError, InternalError, PermissionDeniedError

EPILOG = (
    "Exit codes: 0 ok, 1 failure, 2 usage, 3 daemon unreachable, 4 not found, 5 integrity, 6 timeout, "
    "69 backend unavailable, 77 permission, 78 configuration. `image run` exits with the code of the command."
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
app.command("status")(status_cmd.status)
app.command("doctor")(doctor_cmd.doctor)


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
    try:
        result = app(standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except BootseerError as error:
        code = fail(error)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes stdout once more at its end
        code = 128 + signal.SIGPIPE
    except PermissionError as error:
        code = fail(
            PermissionDeniedError(f"{error.filename or error}: {error.strerror or 'permission denied'}")
        )
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        code = fail(InternalError(f"{where}{error.strerror or error}"))
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # click's own usage errors
            say(error.format_message())
            code = int(error.exit_code)
        elif type(error).__name__ == "Abort":
            code = 130
        else:
            raise
    sys.exit(code)


if __name__ == "__main__":
    main()
