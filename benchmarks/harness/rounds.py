"""Interleaved rounds: everything that is compared takes its turn in each."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import quantiles


def rotated(names: list[str], number: int) -> list[str]:
    """The order of round ``number``: everybody is first, and has two different predecessors."""
    start = number % len(names)
    turned = names[start:] + names[:start]
    return turned if (number // len(names)) % 2 == 0 else turned[::-1]


def quartiles(quotients: Sequence[float]) -> tuple[float, float, float]:
    """The lower one, the median and the upper one, of at least two numbers."""
    low, middle, high = quantiles(quotients, n=4, method="inclusive")
    return low, middle, high
