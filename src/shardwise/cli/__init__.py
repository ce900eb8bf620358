"""The ``shardwise`` command, and the only place that prints.

``commands`` declares options and help; a command is implemented in the file of its name, which
imports torch. A ``ShardwiseError`` or an ``OSError`` ends a command with its message on stderr and
status 1. A traceback means a bug in shardwise.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from io import TextIOWrapper

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; ``arguments`` are those of the process if not given."""
    if arguments is None:
        # Or the interpreter would look for garbage in all of torch at its end: a second, in which
        # a rank that has said that another was killed would still be there.
        atexit.register(gc.freeze)
        if isinstance(sys.stdout, TextIOWrapper):  # what its encoding lacks is no reason to end
            sys.stdout.reconfigure(errors="replace")
        if "train" in sys.argv:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # there is nothing to save yet
    try:
        _run(arguments)  # includes the imports, so Ctrl-C prints no traceback during them
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _run(arguments: list[str] | None) -> None:
    import click

    from shardwise.cli.commands import commands
    from shardwise.cli.format_names import escape_lines
    from shardwise.errors import ShardwiseError
    from shardwise.launch.error_files import os_error_message

    try:
        sys.exit(commands.main(arguments, standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort as abort:
        if isinstance(abort.__context__, EOFError):
            click.echo("\nerror: the input ended before all was answered; pass --yes.", err=True)
            sys.exit(1)
        sys.exit(128 + signal.SIGINT)
    except ShardwiseError as error:
        click.echo(f"error: {escape_lines(str(error))}", err=True)  # it may quote names of files
        sys.exit(1)
    except OSError as error:
        if error.filename is None and _output_fails():
            error.filename = "the standard output"
        click.echo(f"error: {escape_lines(os_error_message(error))}", err=True)
        sys.exit(1)


def _output_fails() -> bool:
    """Does writing to stdout fail? Then the rest of the output is discarded."""
    try:
        sys.stdout.write("\n")  # the buffer was dropped by the failed write, so write anew
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False
