"""A report as a picture: a panel of horizontal bars for each column that is to be drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.report import Column, Report, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(report: Report, path: Path) -> None:
    """Write the picture to ``path`` (PNG). Without a column to draw nothing is written.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure  # not pyplot: no display and no global state

    panels = [
        (table, column) for table in report.tables for column in table.columns if column.drawn
    ]
    if not panels:
        return
    rows = max(len(table.rows) for table, _ in panels)
    figure = Figure((5.5 * len(panels), 1.2 + 0.38 * rows), dpi=130, layout="constrained")
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    for (table, column), axes in zip(panels, every, strict=True):
        _panel(axes, table, column)
    figure.savefig(path, format="png")


def _panel(axes: Axes, table: Table, column: Column) -> None:
    """A bar for each row that has the number, a line at its target, and a dashed one at 1."""
    cells = {str(row[0]): row[table.columns.index(column)] for row in table.rows[::-1]}
    values = {name: float(cell) for name, cell in cells.items() if isinstance(cell, int | float)}
    axes.bar_label(axes.barh([*values], [*values.values()]), fmt="%.2f", padding=4)
    axes.axvline(1.0, color="black", linestyle="--", linewidth=1)
    if column.target is not None:
        axes.axvline(column.target, color="red", linewidth=1)
    axes.set_xlim(0, 1.15 * max(1.0, *values.values()))
    axes.set_title(f"{table.title.partition(':')[0]}: {column.name}", fontsize=10)
