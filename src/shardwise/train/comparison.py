"""Records of what was known beforehand, and of that beside what a run took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Compared:
    """The plan of a step beside what steps took.

    Attributes:
        planned_memory, memory: bytes on the device at most after an event of a recorded step;
            ``None``: no step was recorded.
        planned_rate, rate: tokens per second over all ranks.
        planned_mfu, mfu: model FLOP utilisation; planned numbers of time and these are ``None``
            where the machine's speed is not known.
        off: the terms by which sums differ by more than a tenth.
        differs: the first event that was not planned, or at which the engine held other bytes;
            ``""``: there is none. ``None``: no step was recorded.
        events: of a step.
    """

    planned_memory: int
    memory: int | None
    planned_rate: float | None
    rate: float
    planned_mfu: float | None
    mfu: float | None
    off: tuple[str, ...]
    differs: str | None
    events: int


@dataclass(frozen=True)
class Predicted:
    """Bytes that each rank will keep, known before the model is read.

    Attributes:
        parameters, gradients, optimizer: on the device, with padding.
        in_host: of the same, what ``sharding.offload`` keeps in host memory.
        gathered: full parameters at most at a time, besides.
    """

    parameters: int
    gradients: int
    optimizer: int
    in_host: int
    gathered: int


def beside(planned: float | None, measured: float | None, form: Callable[[Any], str]) -> str:
    """Say both, and how much more was measured. Time has a plan where the machine's speed is known.

    Args:
        form: a number in words.
    """
    if planned is None:
        if measured is None:
            return "not known without --machines"
        return f"{form(measured)} measured, no plan without --machines"
    if measured is None:
        return f"{form(planned)} planned"
    return f"{form(planned)} planned, {form(measured)} measured ({more(planned, measured)})"


def more(planned: float, measured: float) -> str:
    """``+10%`` for 11 in place of 10; ``""`` in place of none."""
    return f"{measured / planned - 1:+.0%}" if planned else ""
