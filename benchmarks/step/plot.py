"""The report as one picture: a bar for each engine, one panel for each model and world.

Drawn with the object interface on Agg: no display, no global figure, no state left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.step.results import Report, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

OURS, PLAIN, RIVAL = "#4477aa", "#222222", "#bbbbbb"
COLOURS = {
    "plain": PLAIN,
    **dict.fromkeys(("no_shard", "zero1", "shard_grad_op", "full_shard"), OURS),
    **dict.fromkeys(("shard_grad_op_memory", "full_shard_memory"), OURS),
}


def draw(report: Report, path: Path) -> None:
    """Write the picture to ``path`` (PNG). Does nothing where no step was timed.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = [row for row in report.rows if row.times is not None]
    panels = [list(rows) for _, rows in groupby(timed, key=lambda row: (row.model, row.world))]
    if not panels:
        return
    tallest = max(map(len, panels))
    size = (5.5 * len(panels), 1.2 + 0.38 * tallest)
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    for rows, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        _panel(axes, rows)
    figure.suptitle(f"Time of a step ÷ the same step without communication ({report.optimizer})")
    figure.savefig(path, format="png")


def _panel(axes: Axes, rows: Sequence[Row]) -> None:
    """Medians as bars, quartiles as whiskers, the fastest first."""
    times = {row.engine: row.times for row in rows if row.times is not None}
    names = sorted(times, key=lambda name: -times[name].ratio)
    ratios = [times[name].ratio for name in names]
    whiskers = [
        [times[name].ratio - times[name].low for name in names],
        [times[name].high - times[name].ratio for name in names],
    ]
    colours = [COLOURS.get(name, RIVAL) for name in names]
    axes.barh(names, ratios, xerr=whiskers, color=colours, ecolor="#888888")
    for place, name in enumerate(names):
        axes.annotate(
            f"{times[name].ratio:.2f}",
            (times[name].high, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
        )
    axes.axvline(1.0, color=PLAIN, linestyle="--", linewidth=1)
    axes.set_xlim(0, 1.12 * max(times[name].high for name in names))
    axes.set_title(f"{rows[0].model}, {rows[0].world} ranks", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
