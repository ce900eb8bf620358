"""Reports as pictures: panels of horizontal bars.

Drawn with the object interface on Agg: no display, no global figure, no state left behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE = "#222222"


class Bar(NamedTuple):
    """One number, with its quartiles or its target where it has them."""

    label: str
    value: float
    colour: str
    low: float | None = None
    high: float | None = None
    target: float | None = None


def draw(title: str, panels: Mapping[str, Sequence[Bar]], path: Path) -> None:
    """Write panels of bars, top to bottom, to ``path`` (PNG). Without panels nothing is written.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not panels:
        return
    size = (5.5 * len(panels), 1.2 + 0.38 * max(map(len, panels.values())))
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    for (name, bars), axes in zip(panels.items(), every, strict=True):
        _panel(axes, name, bars[::-1])
    figure.suptitle(title)
    figure.savefig(path, format="png")


def _panel(axes: Axes, name: str, bars: Sequence[Bar]) -> None:
    """Quartiles as whiskers, a tick at a target, and a dashed line at 1."""
    places = range(len(bars))
    axes.barh(places, [bar.value for bar in bars], color=[bar.colour for bar in bars])
    axes.set_yticks(places, [bar.label for bar in bars])
    for place, bar in enumerate(bars):
        end = bar.value
        if bar.low is not None and bar.high is not None:
            axes.plot([bar.low, bar.high], [place, place], color="#888888")
            end = bar.high
        if bar.target is not None:
            axes.plot([bar.target] * 2, [place - 0.4, place + 0.4], color=LINE, linewidth=2)
        axes.annotate(
            f"{bar.value:.2f}", (end, place), (4, 0), textcoords="offset points", va="center"
        )
    axes.axvline(1.0, color=LINE, linestyle="--", linewidth=1)
    axes.set_xlim(0, 1.15 * max(1.0, *(bar.high or bar.value for bar in bars)))
    axes.set_title(name, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
