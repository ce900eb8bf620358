"""The ``shardwise`` command, and the only place that prints.

``commands`` declares options and help; what a command does is in the file of its name, which
imports torch. An error of ours ends a command with its message on one line of stderr and status 1;
a traceback means a bug of ours.
"""

from __future__ import annotations

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
