"""Rows as aligned columns of plain text."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

LINE_WIDTH = 100_000  # characters of a line: nothing is cut or wrapped, wherever it is printed


def terminal_width() -> int:
    """The columns of the terminal; without one, lines are as long as they are."""
    return shutil.get_terminal_size((LINE_WIDTH, 0)).columns


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = (), left: int = 1) -> list[str]:
    """Lines with columns as wide as their widest cell: the first to the left, others to the right.

    Args:
        left: how many of the columns hold words, and go to the left.
        head: the columns' titles, with a rule below; no titles if empty.
    """
    rows = list(rows)
    if not rows:
        return []
    padding, style = ((0, 1, 0, 0), box.SIMPLE_HEAD) if head else ((0, 2, 0, 0), None)
    grid = Table(
        box=style, show_header=bool(head), show_edge=False, pad_edge=False, padding=padding
    )
    for number, title in enumerate(head or rows[0]):
        justify = "left" if number < left else "right"
        grid.add_column(Text(title), justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in rows:
        grid.add_row(*map(Text, row))
    text = io.StringIO()
    Console(file=text, width=LINE_WIDTH, color_system=None).print(grid)
    return [line.rstrip() for line in text.getvalue().splitlines()]
