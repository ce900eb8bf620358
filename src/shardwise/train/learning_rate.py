"""The learning rate of each step: linear warm-up, then cosine decay. A pure function.

A scheduler object would have a step count of its own to save and restore; a function of the step
has no state.
"""

from __future__ import annotations

import math

from shardwise.train.config import OptimizerConfig

__all__ = ["learning_rate"]


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The learning rate of step ``step`` (the first is 0) of ``steps``.

    Step ``warmup`` is the first at the peak, and the last step is at ``floor × lr``
    (Loshchilov & Hutter 2017, arXiv 1608.03983, without restarts).
    """
    if step < config.warmup:
        return config.lr * (step + 1) / (config.warmup + 1)
    progress = (step - config.warmup) / max(1, steps - 1 - config.warmup)
    cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return config.lr * (config.floor + (1 - config.floor) * cosine)
