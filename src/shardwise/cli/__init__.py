"""The ``shardwise`` command: one file per subcommand, and the only place that prints.

An error of ours ends a command with its message on one line of stderr and status 1; a traceback
means a bug of ours.
"""

from __future__ import annotations

import sys

import click

from shardwise.cli.export import export_command
from shardwise.cli.folded import shown_lines
from shardwise.cli.inspect import inspect_command
from shardwise.cli.train import train_command
from shardwise.errors import ShardwiseError

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shardwise", message="%(package)s %(version)s")
def commands() -> None:
    """Fully sharded data-parallel training that can be planned, read and trusted."""


commands.add_command(train_command)
commands.add_command(inspect_command)
commands.add_command(export_command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; ``arguments`` are those of the process if not given."""
    try:
        commands(arguments)
    except ShardwiseError as error:
        click.echo(f"error: {shown_lines(str(error))}", err=True)  # it may quote names of files
        sys.exit(1)
