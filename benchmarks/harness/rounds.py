"""Interleaved rounds: everything that is compared takes its turn in each, on the same machine."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from statistics import quantiles
from typing import TypeVar

Lap = TypeVar("Lap")


def interleaved(
    names: Sequence[str], rounds: int, lap: Callable[[str, int], Lap]
) -> dict[str, list[Lap]]:
    """``lap(name, number)`` of each name in each round; garbage is collected between rounds."""
    laps: dict[str, list[Lap]] = {name: [] for name in names}
    gc.disable()  # a pause belongs to nobody
    for number in range(rounds):
        gc.collect()
        for name in rotated(names, number):
            laps[name].append(lap(name, number))
    gc.enable()
    return laps


def rotated(names: Sequence[str], number: int) -> list[str]:
    """The order of round ``number``: everybody is first, and has two different predecessors."""
    start = number % len(names)
    turned = [*names[start:], *names[:start]]
    return turned if (number // len(names)) % 2 == 0 else turned[::-1]


def slowest(ranks: Sequence[Sequence[Lap]], seconds: Callable[[Lap], float]) -> list[Lap]:
    """The lap of the rank that took longest, of each round; ``ranks``: each one's laps."""
    return [max(laps, key=seconds) for laps in zip(*ranks, strict=True)]


def paired(mine: Sequence[float], rival: Sequence[float]) -> tuple[float, float, float]:
    """Mine ÷ the rival's of the same round: the lower quartile, the median, the upper quartile."""
    quotients = [one / other for one, other in zip(mine, rival, strict=True)]
    low, middle, high = quantiles(quotients, n=4, method="inclusive")
    return low, middle, high
