"""Types of arguments and options, and what several commands have."""

from __future__ import annotations

from pathlib import Path

import click

PATH = click.Path(path_type=Path)
FILE = click.Path(path_type=Path, dir_okay=False)  # which may not exist yet
EXISTING_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
COUNT = click.IntRange(min=1)
NUMBER = click.IntRange(min=0)

WITH_OVERRIDES = {"ignore_unknown_options": True}  # context settings of a command with:
OVERRIDES = click.argument(
    "overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--KEY VALUE]..."
)
