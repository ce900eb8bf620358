"""Types of arguments and options, and what several commands have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click


class FileToWrite(click.Path):
    """A file that may not exist yet, in a folder that does: known before minutes of work."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path. Raises ``click.BadParameter``: it is a folder, or lies in none."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        existing = next(parent for parent in path.parents if parent.exists())
        if not existing.is_dir():
            self.fail(f"{existing} is a file, and no folder. Name another file.", param, ctx)
        if existing != path.parent:
            self.fail(
                f"the folder {path.parent} does not exist. Make it, or name another file.",
                param,
                ctx,
            )
        return path


class Picture(FileToWrite):
    """A file to draw to, as PNG."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path. Raises ``click.BadParameter``: its name says that it is no PNG."""
        path = super().convert(value, param, ctx)
        if path.suffix.lower() != ".png":
            self.fail(f"it is drawn as PNG. Write {path.with_suffix('.png')}.", param, ctx)
        return path


PATH = click.Path(path_type=Path)
FILE = FileToWrite(path_type=Path, dir_okay=False)
PICTURE = Picture(path_type=Path, dir_okay=False)
EXISTING_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
COUNT = click.IntRange(min=1)
NUMBER = click.IntRange(min=0)
LENGTH = click.IntRange(min=2)  # of a row: one token predicts none

WITH_OVERRIDES = {"ignore_unknown_options": True}  # context settings of a command with:
OVERRIDES = click.argument(
    "overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--KEY VALUE]..."
)
