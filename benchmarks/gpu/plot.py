"""The report as one picture: step time and peak memory as multiples of the rival's.

Drawn with the object interface on Agg: no display, no global figure, no state left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.results import MOST_MEMORY, MOST_TIME, Case, Report, Verdict, verdicts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

TIME, MEMORY, LINE = "#4477aa", "#88bbdd", "#222222"


def draw(report: Report, path: Path) -> None:
    """Write the picture to ``path`` (PNG). Does nothing where nothing was held against a rival.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [(case, verdicts(case)) for case in report.cases]
    panels = [(case, found) for case, found in panels if any(map(_bars, found))]
    if not panels:
        return
    figure = Figure(figsize=(4.8 * len(panels), 3.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for (case, found), place in zip(panels, axes, strict=True):
        _panel(place, case, found)
    figure.suptitle("Step time and peak memory ÷ FSDP2's, simulated peers")
    figure.savefig(path, format="png")


def _bars(verdict: Verdict) -> list[tuple[str, float, str, float]]:
    """Label, value, colour and target of each number that is there."""
    parts = [
        ("step", verdict.time, TIME, MOST_TIME),
        ("peak", verdict.memory, MEMORY, MOST_MEMORY),
    ]
    return [
        (f"{verdict.engine}\n{name} ÷ {verdict.rival}", value, colour, target)
        for name, value, colour, target in parts
        if value is not None
    ]


def _panel(axes: Axes, case: Case, found: Sequence[Verdict]) -> None:
    """A bar for each number, with a tick at its target and a line at the rival."""
    bars = [bar for verdict in found for bar in _bars(verdict)][::-1]
    names = [name for name, *_ in bars]
    axes.barh(names, [bar[1] for bar in bars], color=[bar[2] for bar in bars])
    for place, (_, value, _, target) in enumerate(bars):
        axes.plot([target, target], [place - 0.4, place + 0.4], color=LINE, linewidth=2)
        axes.annotate(
            f"{value:.2f}", (value, place), xytext=(4, 0), textcoords="offset points", va="center"
        )
    axes.axvline(1.0, color=LINE, linestyle="--", linewidth=1)
    axes.set_xlim(0, 1.15 * max(1.0, *(bar[1] for bar in bars)))
    axes.set_title(f"{case.model}, rank 0 of {case.world}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
