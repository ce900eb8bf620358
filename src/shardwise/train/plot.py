"""The loss curve as a picture, from the records of a run.

Drawn with the object interface on Agg: no display, no global figure, no state left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


from shardwise.train.metrics import Evaluated, Record, Stepped

__all__ = ["draw", "smoothed"]

INK, TRAINING, VALIDATION = "#222222", "#4477aa", "#cc6677"


def smoothed(losses: Sequence[float], memory: float = 0.9) -> list[float]:
    """An exponential mean without the pull of its start (Kingma & Ba 2015, §3)."""
    mean, weight, out = 0.0, 0.0, []
    for loss in losses:
        mean = memory * mean + (1 - memory) * loss
        weight = memory * weight + (1 - memory)
        out.append(mean / weight)
    return out


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
    axes.plot(at, smoothed(losses), color=TRAINING, linewidth=2, label="training, smoothed")
    if evaluations:
        axes.plot(
            [e.step for e in evaluations],
            [e.loss for e in evaluations],
            color=VALIDATION,
            marker="o",
            markersize=5,
            linewidth=1.5,
            label="validation",
        )
        last = evaluations[-1]
        axes.axhline(
            last.unigram_entropy,
            color=INK,
            linestyle="--",
            linewidth=1,
            label=f"unigram entropy of the validation text ({last.unigram_entropy:.3f})",
        )
        axes.annotate(
            f"{last.loss:.3f}",
            (last.step, last.loss),
            xytext=(0, -14),
            textcoords="offset points",
            color=VALIDATION,
            ha="right",
        )
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    axes.set_xlim(0, max(at, default=1) * 1.02)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    axes.legend(frameon=False)
    figure.savefig(path, format="png")
