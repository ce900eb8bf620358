"""Plots the records of a run: loss, learning rate, gradient norm and tokens/s.

Uses matplotlib's object interface on Agg: no display and no global figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardwise.train.records import Evaluated, Record, Stepped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, TRAINING, VALIDATION = "#222222", "#4477aa", "#cc6677"
PANELS = {"lr": "learning rate", "grad_norm": "gradient norm", "tokens_per_second": "tokens/s"}


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
    """Write training and validation loss, and rate, norm and speed below, to ``path`` (PNG).

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [record for record in records if isinstance(record, Stepped)]
    evaluations = [record for record in records if isinstance(record, Evaluated)]
    figure = Figure(figsize=(8, 6.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, len(PANELS), height_ratios=(2.2, 1))
    axes = figure.add_subplot(grid[0, :])
    _plot_training(axes, steps)
    if evaluations:
        _plot_validation(axes, evaluations)
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    axes.legend(frameon=False)
    steps_x = [s.step for s in steps]
    for column, (name, label) in enumerate(PANELS.items()):
        panel = figure.add_subplot(grid[1, column])
        panel.plot(steps_x, [getattr(s, name) for s in steps], color=TRAINING, linewidth=1)
        panel.set(title=label, xlabel="step")
    for each in figure.axes:
        each.set_xlim(0, max(steps_x, default=1) * 1.06)  # room for the last number
        each.spines[["top", "right"]].set_visible(False)
        each.grid(alpha=0.2)
    figure.savefig(path, format="png")


def _plot_training(axes: Axes, steps: Sequence[Stepped]) -> None:
    """Plot the loss of each step, and its running mean."""
    steps_x, losses = [s.step for s in steps], [s.loss for s in steps]
    axes.plot(steps_x, losses, color=TRAINING, alpha=0.35, linewidth=1, label="training, each step")
    means, first = smoothed(losses)
    middle = steps_x[first : first + len(means)]
    axes.plot(middle, means, color=TRAINING, linewidth=2, label="training, running mean")


def _plot_validation(axes: Axes, evaluations: Sequence[Evaluated]) -> None:
    """Plot the validation loss with its last value.

    The unigram entropy is a baseline where losses come near it; further away, as of a fine-tuned
    model, it would leave no room for the curve, and stands in the legend alone.
    """
    steps_x, losses = [e.step for e in evaluations], [e.loss for e in evaluations]
    entropy = evaluations[-1].unigram_entropy
    label = f"unigram baseline ({entropy:.3f})"
    axes.plot(steps_x, losses, color=VALIDATION, marker="o", markersize=5, label="validation")
    low, high = axes.get_ylim()
    if low - (high - low) / 2 < entropy < high + (high - low) / 2:
        axes.axhline(entropy, color=INK, linestyle="--", linewidth=1, label=label)
    else:
        axes.plot([], [], " ", label=label)
    axes.annotate(
        f"{losses[-1]:.3f}",
        (steps_x[-1], losses[-1]),
        xytext=(6, 0),
        textcoords="offset points",
        color=VALIDATION,
        va="center",
    )


def plot_engines(engines: Mapping[str, tuple[float, int]], title: str, path: Path) -> None:
    """Write a bar for each engine's milliseconds of a step, and for its bytes, to ``path`` (PNG).

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.4 * len(engines)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    names = list(engines)[::-1]
    time, memory = figure.subplots(1, 2, sharey=True)
    time.barh(names, [engines[name][0] for name in names], color=TRAINING)
    time.set_xlabel("ms a step")
    memory.barh(names, [engines[name][1] / 1e6 for name in names], color=VALIDATION)
    memory.set_xlabel("MB at most, all ranks")
    figure.savefig(path, format="png")
