"""The ``shardwise`` command, and the only place that prints.

``commands`` declares options and help; what a command does is in the file of its name, which
imports torch. An error of ours ends a command with its message on one line of stderr and status 1;
so does one of the operating system. A traceback means a bug of ours.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; ``arguments`` are those of the process if not given."""
    try:
        _run(arguments)  # imports are interrupted as quietly as work is
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _run(arguments: list[str] | None) -> None:
    import click

    from shardwise.cli.commands import commands
    from shardwise.cli.folded import shown_lines
    from shardwise.errors import ShardwiseError
    from shardwise.launch.reasons import of_system

    try:
        sys.exit(commands.main(arguments, standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(128 + signal.SIGINT)
    except ShardwiseError as error:
        click.echo(f"error: {shown_lines(str(error))}", err=True)  # it may quote names of files
        sys.exit(1)
    except OSError as error:
        if error.filename is None and _output_fails():
            error.filename = "the standard output"
        click.echo(f"error: {shown_lines(of_system(error))}", err=True)
        sys.exit(1)


def _output_fails() -> bool:
    """Is it stdout that cannot be written? Then what is left for it goes nowhere, quietly."""
    try:
        sys.stdout.write("\n")  # what failed to be written is not kept, so it takes another try
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False
