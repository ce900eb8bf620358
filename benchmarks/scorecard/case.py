"""A case, and how it ended: decided from what the ranks sent, without running anything."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from benchmarks.scorecard.engines import Engine

RIGHT, NAMED, UNNAMED = "clear result", "named error", "unnamed error"
WRONG, HANG = "wrong", "hang or abort"
OUTCOMES = (RIGHT, NAMED, UNNAMED, WRONG, HANG)


class Result(NamedTuple):
    """How one engine did in one case, or one rank of it."""

    outcome: str
    detail: str = ""  # the number that is wrong, or the error's message


@dataclass(frozen=True)
class Case:
    """A program, and what an error of it must name.

    Attributes:
        pain: its number, or ``"misuse"``.
        title: what the program does.
        run: what it computes; the same for every engine.
        names: words of which an error's message must contain each (alternatives by ``|``).
        timeout: seconds that a collective may take.
        tolerance: of values, relative to each tensor's largest; sums over ranks have another order.
    """

    pain: str
    title: str
    run: Callable[[Engine], dict[str, Tensor]]
    names: tuple[str, ...] = ()
    timeout: float = 1800.0
    tolerance: float = 2e-5


def compared(values: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float) -> Result:
    """Is every value that of plain training?"""
    if values.keys() != truth.keys():
        return Result(WRONG, f"names differ: {sorted(values.keys() ^ truth.keys())[:3]}")
    for name, value in values.items():
        expected = truth[name]
        if value.shape != expected.shape:
            return Result(WRONG, f"{name} is {[*value.shape]}, not {[*expected.shape]}")
        off, most = (value.double() - expected.double()).abs().max(), expected.double().abs().max()
        if not off <= tolerance * most:
            return Result(WRONG, f"{name} is off by {off:.2g}, and its largest value is {most:.2g}")
    return Result(RIGHT)


def classified(error: BaseException, names: Sequence[str]) -> Result:
    """An error; is what is wrong in its message?"""
    text = " ".join(str(error).split())
    named = bool(names) and all(re.search(word, text) for word in names)
    return Result(NAMED if named else UNNAMED, f"{type(error).__name__}: {text}")


def of_both(ranks: Sequence[Result]) -> Result:
    """The worst of the ranks; but what one rank's error names, the user has read."""
    order = (RIGHT, UNNAMED, NAMED, WRONG, HANG)
    return max(ranks, key=lambda result: order.index(result.outcome))
