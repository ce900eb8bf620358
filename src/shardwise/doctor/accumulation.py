"""The cost of reducing gradients after every micro-batch of a step, or after the last alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shardwise.plan import order
from shardwise.plan.blueprint import Blueprint
from shardwise.plan.forecast.passes import passes_of


@dataclass(frozen=True)
class Accumulated:
    """One rank's bytes in a step of several micro-batches.

    Attributes:
        strategy: its name.
        sent_each, sent_once: by this rank in the step, if gradients are reduced after each
            micro-batch (``accumulate(last=True)``), or once.
        gradients_each, gradients_once: gradients that lie between two micro-batches, without
            padding: means of this rank's shards; or its own sums, whole, in the dtype of sums, on
            the device.
    """

    strategy: str
    sent_each: int
    sent_once: int
    gradients_each: int
    gradients_once: int


def accumulated(model: nn.Module, blueprint: Blueprint, micro_batches: int) -> Accumulated:
    """Both ways to accumulate ``micro_batches`` as ``blueprint`` cuts ``model``."""
    first = order.guess(model, blueprint.units.unit_names)

    def sent(each: bool) -> int:
        sums = 0
        for mode, times, _ in passes_of(micro_batches, each):
            schedule = blueprint.schedule(first, mode)
            sums += times * sum(map(schedule.sent, schedule.events))
        return sums

    slots = [(spec, slot) for spec in blueprint.buckets if spec.trainable for slot in spec.slots]
    return Accumulated(
        blueprint.placement.name,
        sent_each=sent(each=True),
        sent_once=sent(each=False),
        gradients_each=sum(blueprint.parameters[slot.name].nbytes for _, slot in slots),
        gradients_once=sum(slot.numel * spec.dtypes.sum.itemsize for spec, slot in slots),
    )
