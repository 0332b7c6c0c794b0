"""The command line: parse, call the library, print. Exit status 0, 1 for an error, 2 for wrong usage."""

from __future__ import annotations

import sys
from contextlib import suppress

import click

from syncline.cli import check, convert, explain, gate, output, plan, run, serve, versions
from syncline.errors import SynclineError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="syncline")
def group() -> None:
    """Keep inference engines bit-identical to a trainer at about one percent of the bytes."""


for module in (versions, check, convert, gate, serve, plan, explain, run):
    for command in module.COMMANDS:
        group.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; every error becomes one line on standard error and exit status 1."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        group.main(arguments, prog_name="syncline", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        _fail(arguments, "Interrupted", "interrupted", 130)
    except SynclineError as error:
        _fail(arguments, type(error).__name__, str(error), 1)
    except OSError as error:
        _fail(arguments, type(error).__name__, str(error), 1)
    except Exception as error:  # noqa: BLE001 - a person gets a line, not a traceback
        message = f"{error}; this is a defect in Syncline, please report it"
        _fail(arguments, type(error).__name__, message, 1)


def _fail(arguments: list[str], kind: str, message: str, status: int) -> None:
    line = " ".join(message.split())
    if "--json" in arguments:
        with suppress(OSError):  # standard output itself may be what failed
            output.show_json({"error": kind, "message": line})
    print(f"error: {line}", file=sys.stderr)
    sys.exit(status)
