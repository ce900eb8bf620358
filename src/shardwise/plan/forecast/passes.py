"""The forward and backward passes of one step, one for each micro-batch, by what each does."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.plan.schedule.events import Mode


class Passes(NamedTuple):
    """Passes of a step that are alike, one after the other."""

    mode: Mode
    times: int = 1  # how many there are
    reduced: int = 0  # how many before it in the step have left mean gradients, at least


def passes_of(micro_batches: int, each: bool = False) -> list[Passes]:
    """The passes of a step in their order; ``each``: gradients are reduced in all of them."""
    more = micro_batches - 2
    if more < 0:
        return [Passes("train")]
    if each:
        listed = [Passes("train"), Passes("train", 1, 1), Passes("train", more, 2)]
    else:
        listed = [Passes("accumulate"), Passes("between", more), Passes("last")]
    return [passes for passes in listed if passes.times]
