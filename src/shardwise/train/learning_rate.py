"""The learning rate of each step: linear warm-up, then a schedule. A pure function.

A scheduler object would have a step count of its own to save and restore; a function of the step
has no state.
"""

from __future__ import annotations

import math

from shardwise.recipe.recipe import OptimizerConfig


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The learning rate of step ``step`` (the first is 0) of ``steps``.

    The first step after the warm-up is at the peak, and the last step is at ``floor × lr``: along
    half a cosine (Loshchilov & Hutter 2017, arXiv 1608.03983, without restarts) or a line. Constant
    schedules have a floor of 1.
    """
    warmup = config.warmup_steps(steps)
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    factor = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.floor + (1 - config.floor) * factor)


def preview(steps: int, config: OptimizerConfig) -> tuple[tuple[int, float], ...]:
    """The first step, counted from 1, the first after the warm-up, the middle, the last; rates."""
    warm = config.warmup_steps(steps)
    shown = sorted({1, min(warm + 1, steps), min(warm + 1 + (steps - warm) // 2, steps), steps})
    return tuple((step, learning_rate(step - 1, steps, config)) for step in shown)
