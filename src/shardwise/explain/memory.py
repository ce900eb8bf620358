"""What each strategy keeps on a rank and sends in a step, in bytes, for one model.

Exact: equal to what tensors of a sharded model sum to. The ordinary rule of thumb, 16 bytes a
parameter, knows neither frozen parameters nor padding nor uneven shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.memory.spec import BucketSpec
from shardwise.schedule.events import Event, Op
from shardwise.setup import order
from shardwise.strategies import PRESETS, STRATEGIES
from shardwise.tracing.blueprint import Blueprint, draw, mesh_of

__all__ = ["OPTIMIZERS", "Kept", "kept", "table_of"]

OPTIMIZERS = {"adamw": (2, 4), "sgd": (0, 0), "momentum": (1, 0)}
"""Of torch.optim: tensors like the parameter, and further bytes (the step's number) for each."""


@dataclass(frozen=True)
class Kept:
    """One rank's bytes under one strategy.

    Attributes:
        strategy: its name.
        parameters, gradients, optimizer: between steps, without padding.
        joined: of this rank's shards, what its copies have updated, with padding.
        padding: of the parameters, which no tensor shows.
        gathered: full buckets at most at a time, besides what is kept.
        sent: by this rank in a step.
        calls: collectives of a step: ``{"forward gather": 3, …}``.
    """

    strategy: str
    parameters: int
    gradients: int
    optimizer: int
    joined: int
    padding: int
    gathered: int
    sent: int
    calls: Mapping[str, int]

    @property
    def between_steps(self) -> int:
        """Parameters, with what copies have updated, gradients and optimizer state."""
        return self.parameters + self.joined + self.gradients + self.optimizer


def table_of(
    model: nn.Module,
    ranks: tuple[int, int],
    optimizer: str = "adamw",
    mesh: tuple[int, int] | None = None,
    **options: Any,
) -> list[Kept]:
    """One row for each strategy, for rank ``ranks[0]`` of ``ranks[1]``; hybrids need a ``mesh``."""
    strategies = PRESETS if mesh else STRATEGIES
    drawn = [
        draw(model, strategy, None, ranks, mesh=mesh_of(strategy, mesh), **options)
        for strategy in strategies
    ]
    return [kept(model, blueprint, optimizer) for blueprint in drawn]


def kept(model: nn.Module, blueprint: Blueprint, optimizer: str = "adamw") -> Kept:
    """What a rank keeps and sends as ``blueprint`` cuts ``model``."""
    copies, more = OPTIMIZERS[optimizer]
    shards = blueprint.parameters
    parameters = sum(shard.nbytes for shard in shards.values())
    trained = [
        shards[slot.name].nbytes
        for spec in blueprint.buckets
        if spec.trainable
        for slot in spec.slots
    ]
    schedule = blueprint.schedule(order.guess(model, blueprint.units.unit_names))
    return Kept(
        strategy=blueprint.placement.name,
        parameters=parameters,
        gradients=sum(trained),
        optimizer=copies * sum(trained) + more * len(trained),
        joined=sum(_joined(spec) for spec in blueprint.buckets),
        padding=sum(_at_rest(spec) for spec in blueprint.buckets) - parameters,
        gathered=_most_gathered(schedule.events, blueprint),
        sent=sum(schedule.sent(event) for event in schedule.events),
        calls=_calls(schedule.events, blueprint),
    )


def _at_rest(spec: BucketSpec) -> int:
    return spec.layout.shard_numel * spec.dtypes.stored.itemsize


def _joined(spec: BucketSpec) -> int:
    """What is kept of a shard besides the own piece of it, where that is not in the full bucket."""
    if not spec.splits_copies or spec.home.lasting:
        return 0
    nbytes = spec.layout.numel // spec.shard.size * spec.dtypes.compute.itemsize
    return nbytes - (_at_rest(spec) if spec.dtypes.stored is spec.dtypes.compute else 0)


def _most_gathered(events: Sequence[Event], blueprint: Blueprint) -> int:
    """Bytes of the full buckets that exist at most at a time, besides what is kept."""
    nbytes = blueprint.nbytes
    if blueprint.placement.resident and blueprint.placement.splits:
        shards = 0 if blueprint.policy.casts else sum(map(_at_rest, blueprint.buckets))
        return sum(unit.gathered for unit in nbytes.values()) - shards  # slices of full buckets
    gathered = most = 0
    for event in events:
        if event.op is Op.GATHER:
            gathered += nbytes[event.unit].gathered
        elif event.op is Op.FREE:
            gathered -= nbytes[event.unit].gathered
        most = max(most, gathered)
    return most


def _calls(events: Sequence[Event], blueprint: Blueprint) -> dict[str, int]:
    """Collectives by phase, one for each bucket that takes part."""
    counts: Counter[str] = Counter()
    split = blueprint.placement.splits
    for event in events:
        specs = blueprint.specs.get(event.unit, ())
        if event.op is Op.GATHER and split:
            counts[f"{event.phase} gather"] += len(specs)
        elif event.op is Op.UPDATE:
            counts["update"] += sum(spec.splits_copies for spec in specs)
        elif event.op is Op.REDUCE:
            counts["reduce"] += sum(spec.trainable for spec in specs)
    return dict(counts)
