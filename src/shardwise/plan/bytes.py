"""Bytes that each strategy keeps on a rank and sends in a step, for one model.

Exact: equal to what tensors of a sharded model sum to. The ordinary rule of thumb, 16 bytes a
parameter, knows neither frozen parameters nor padding nor uneven shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.config.checkpointing import NamedUnits
from shardwise.config.strategies import PRESETS, STRATEGIES, placement_of
from shardwise.plan import order
from shardwise.plan.blueprint import Blueprint
from shardwise.plan.draw import draw, mesh_of
from shardwise.plan.forecast.holdings import Kind
from shardwise.plan.forecast.memory import common_state, forecast, state_nbytes
from shardwise.plan.schedule.events import Event, Op


@dataclass(frozen=True)
class Kept:
    """One rank's bytes under one strategy.

    Attributes:
        strategy: its name.
        parameters, gradients, optimizer: on the device, without padding: parameters and state
            between steps, gradients where they are once they are reduced.
        in_host: the same three in host memory, which ``offload`` has put there.
        joined: of this rank's shards, with padding: what its copies have updated, and a copy on
            the device of what is in host memory.
        padding: of the parameters, which no tensor shows.
        gathered: full buckets at most at a time, besides what is kept.
        buckets: gradients that are written or travel at most at a time.
        sent: by this rank in a step, any but the first.
        calls: collectives of such a step: ``{"forward gather": 3, …}``.
    """

    strategy: str
    parameters: int
    gradients: int
    optimizer: int
    in_host: int
    joined: int
    padding: int
    gathered: int
    buckets: int
    sent: int
    calls: Mapping[str, int]

    @property
    def stored(self) -> int:
        """Bytes on the device: parameters, with ``padding`` and ``joined``."""
        return self.parameters + self.padding + self.joined

    @property
    def between_steps(self) -> int:
        """Bytes on the device: what is ``stored``, gradients and optimizer state."""
        return self.stored + self.gradients + self.optimizer


def table_of(
    model: nn.Module,
    ranks: tuple[int, int],
    optimizer: str = "adamw",
    mesh: tuple[int, int] | None = None,
    unsharded: int | NamedUnits | None = None,
    **options: Any,
) -> list[Kept]:
    """One row for each strategy; the arguments are those of ``blueprints``."""
    drawn = blueprints(model, ranks, mesh, unsharded, **options)
    return [kept(model, blueprint, optimizer) for blueprint in drawn]


def blueprints(
    model: nn.Module,
    ranks: tuple[int, int],
    mesh: tuple[int, int] | None = None,
    unsharded: int | NamedUnits | None = None,
    **options: Any,
) -> Iterator[Blueprint]:
    """One for each strategy, for rank ``ranks[0]`` of ``ranks[1]``; hybrids need a ``mesh``.

    ``mesh`` and ``unsharded`` are those of the strategies that can use them.
    """
    for strategy in PRESETS if mesh else STRATEGIES:
        options["mesh"] = mesh_of(strategy, mesh)
        options["unsharded"] = None if placement_of(strategy).resident else unsharded
        yield draw(model, strategy, ranks=ranks, **options)


def kept(model: nn.Module, blueprint: Blueprint, optimizer: str = "adamw") -> Kept:
    """Return what a rank keeps and sends as ``blueprint`` cuts ``model``."""
    shards = blueprint.parameters
    parameters, gradients, state = [0, 0], [0, 0], [0, 0]  # on the device, in host memory
    for spec in blueprint.buckets:
        nbytes = sum(shards[slot.name].nbytes for slot in spec.slots)
        parameters[spec.in_host] += nbytes
        gradients[spec.in_host] += nbytes * spec.trainable
        state[spec.in_host] += state_nbytes(spec, shards, optimizer)
    in_common, in_host = common_state(blueprint.buckets, optimizer)
    state[in_host] += in_common
    guess = order.guess(model, blueprint.units.unit_names)
    schedule, memory = blueprint.schedule(guess), forecast(blueprint, guess)
    return Kept(
        strategy=blueprint.placement.name,
        parameters=parameters[0],
        gradients=gradients[0],
        optimizer=state[0],
        in_host=parameters[1] + gradients[1] + state[1],
        joined=memory.most[Kind.JOINED],
        padding=sum(spec.rest_nbytes for spec in blueprint.buckets) - sum(parameters),
        gathered=memory.most[Kind.GATHERED],
        buckets=memory.most[Kind.BUCKETS],
        sent=sum(schedule.sent(event) for event in schedule.events),
        calls=_calls(schedule.events, blueprint),
    )


def _calls(events: Sequence[Event], blueprint: Blueprint) -> dict[str, int]:
    """Collectives by phase, one for each bucket that takes part and has peers on that axis."""
    counts: Counter[str] = Counter()
    for event in events:
        specs = blueprint.specs.get(event.unit, ())
        trained = [spec for spec in specs if spec.trainable]
        if event.op is Op.GATHER:
            counts[f"{event.phase} gather"] += sum(not s.kept and s.shard.size > 1 for s in specs)
        elif event.op is Op.UPDATE:
            counts["update"] += sum(spec.splits_copies for spec in specs)
        elif event.op is Op.REDUCE:
            counts["reduce"] += sum(spec.averages[0][0].size > 1 for spec in trained)
        elif event.op is Op.AVERAGE:
            counts["average"] += len(trained)
    return dict(+counts)
