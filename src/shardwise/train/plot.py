"""The loss curve as a picture, from the records of a run.

Drawn with the object interface on Agg: no display, no global figure, no state left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardwise.train.metrics import Evaluated, Record, Stepped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw", "smoothed"]

INK, TRAINING, VALIDATION = "#222222", "#4477aa", "#cc6677"


def smoothed(losses: Sequence[float]) -> tuple[list[float], int]:
    """A running mean over a centred window of about a twentieth of the run.

    Centred, because a mean of the past alone lags behind: it would show training above validation
    while the loss still falls quickly. It ends where its window would: a shorter one, down to a
    single loss, would end the curve in that loss's noise.

    Returns:
        The means, and the index of the loss that the first one stands for.
    """
    half = len(losses) // 40
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    window = 2 * half + 1
    return ((sums[window:] - sums[:-window]) / window).tolist(), half


def draw(records: Sequence[Record], title: str, path: Path) -> None:
    """Write the curve of training and validation loss to ``path`` (PNG).

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [record for record in records if isinstance(record, Stepped)]
    evaluations = [record for record in records if isinstance(record, Evaluated)]
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    at, losses = [s.step for s in steps], [s.loss for s in steps]
    axes.plot(at, losses, color=TRAINING, alpha=0.35, linewidth=1, label="training, each step")
    means, first = smoothed(losses)
    middle = at[first : first + len(means)]
    axes.plot(middle, means, color=TRAINING, linewidth=2, label="training, running mean")
    if evaluations:
        _draw_validation(axes, evaluations)
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    axes.set_xlim(0, max(at, default=1) * 1.06)  # room for the last number
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    axes.legend(frameon=False)
    figure.savefig(path, format="png")


def _draw_validation(axes: Axes, evaluations: Sequence[Evaluated]) -> None:
    """The validation loss with its last value, and the entropy it should fall below."""
    at, losses = [e.step for e in evaluations], [e.loss for e in evaluations]
    entropy = evaluations[-1].unigram_entropy
    says = f"unigram baseline ({entropy:.3f})"
    axes.plot(at, losses, color=VALIDATION, marker="o", markersize=5, label="validation")
    axes.axhline(entropy, color=INK, linestyle="--", linewidth=1, label=says)
    axes.annotate(
        f"{losses[-1]:.3f}",
        (at[-1], losses[-1]),
        xytext=(6, 0),
        textcoords="offset points",
        color=VALIDATION,
        va="center",
    )
