"""Plots the loss curve from the records of a run.

Uses matplotlib's object interface on Agg: no display and no global figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardwise.train.records import Evaluated, Record, Stepped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_loss", "smoothed"]

INK, TRAINING, VALIDATION = "#222222", "#4477aa", "#cc6677"


def smoothed(losses: Sequence[float]) -> tuple[list[float], int]:
    """A running mean over a centred window of about a twentieth of the run.

    A mean of past losses only would lag, and show training above validation while the loss falls
    quickly. The curve has no means at its ends, where the window would be shorter and noisier.

    Returns:
        The means, and the index of the loss at the centre of the first one.
    """
    half = len(losses) // 40
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    window = 2 * half + 1
    return ((sums[window:] - sums[:-window]) / window).tolist(), half


def plot_loss(records: Sequence[Record], title: str, path: Path) -> None:
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
    steps_x, losses = [s.step for s in steps], [s.loss for s in steps]
    axes.plot(steps_x, losses, color=TRAINING, alpha=0.35, linewidth=1, label="training, each step")
    means, first = smoothed(losses)
    middle = steps_x[first : first + len(means)]
    axes.plot(middle, means, color=TRAINING, linewidth=2, label="training, running mean")
    if evaluations:
        _plot_validation(axes, evaluations)
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    axes.set_xlim(0, max(steps_x, default=1) * 1.06)  # room for the last number
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    axes.legend(frameon=False)
    figure.savefig(path, format="png")


def _plot_validation(axes: Axes, evaluations: Sequence[Evaluated]) -> None:
    """Plot the validation loss with its last value, and the unigram entropy as a baseline."""
    steps_x, losses = [e.step for e in evaluations], [e.loss for e in evaluations]
    entropy = evaluations[-1].unigram_entropy
    label = f"unigram baseline ({entropy:.3f})"
    axes.plot(steps_x, losses, color=VALIDATION, marker="o", markersize=5, label="validation")
    axes.axhline(entropy, color=INK, linestyle="--", linewidth=1, label=label)
    axes.annotate(
        f"{losses[-1]:.3f}",
        (steps_x[-1], losses[-1]),
        xytext=(6, 0),
        textcoords="offset points",
        color=VALIDATION,
        va="center",
    )
