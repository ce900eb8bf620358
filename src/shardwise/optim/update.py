"""One optimizer step as a list of kernel calls, decided before it is carried out.

Which parameters have a gradient, and how often each was updated, seldom changes from one step
to the next. So the calls, with every slice of every flat buffer, are worked out once and
carried out until one of these changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise.cuts import Cuts, Place
from shardwise.optim.held import STEP, Held
from shardwise.optim.runs import runs

__all__ = ["Call", "Key", "Update", "decide"]


class Key(NamedTuple):
    """What slots have in common that are updated in one go.

    Attributes:
        group: the position of their parameter group.
        fresh: whether their state was made for this step.
        age: how often they were updated.
    """

    group: int
    fresh: bool
    age: float


@dataclass(frozen=True)
class Call:
    """One call of a fused kernel: runs of one dtype and one group, all fresh or none.

    Attributes:
        group: the position of the parameter group.
        fresh: whether their state was made for this step.
        params: slices of shards, one for each run.
        state: the same slices of state, by name; 0-dim where it is one number.
        gradients: the positions of their gradients among those of all runs.
    """

    group: int
    fresh: bool
    params: list[Tensor] = field(default_factory=list)
    state: dict[str, list[Tensor]] = field(default_factory=dict)
    gradients: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Update:
    """One step.

    Attributes:
        calls: in any order.
        cuts: how each bucket's flat gradient is cut into runs; ``None`` where there are none.
        ranks: of every run, which rank sums the gradients of the piece that it lies in.
        params: every parameter that is updated, whether or not this rank has elements of it.
        counted: of each bucket, what to add to its counts of steps, if anything.
    """

    calls: Sequence[Call]
    cuts: Sequence[Cuts | None]
    ranks: Sequence[int]
    params: Sequence[nn.Parameter]
    counted: Sequence[Tensor | None]

    @property
    def lasts(self) -> bool:
        """Would the next step be the same?"""
        return not any(call.fresh for call in self.calls)


def decide(
    held: Sequence[Held], keys: Sequence[Sequence[Key | None]], names: Sequence[Sequence[str]]
) -> Update:
    """The step of these slots.

    Args:
        held: the buckets.
        keys: of each bucket's slots; ``None`` for one without a gradient.
        names: the names of the state that each parameter group has.
    """
    calls: dict[tuple[torch.dtype, int, bool], Call] = {}
    cuts, ranks = list[Cuts | None](), list[int]()
    for one, mine in zip(held, keys, strict=True):
        spec, places = one.bucket.spec, [(share.start, share.stop) for share in one.shares]
        found = runs(places, mine, spec.piece_numel)
        for run in found:
            group, fresh, _ = run.key
            call = calls.setdefault((one.shard.dtype, group, fresh), Call(group, fresh))
            call.params.append(one.shard[run.start : run.stop])
            for name in names[group]:
                call.state.setdefault(name, []).append(one.state_of(name, run))
            call.gradients.append(len(ranks))
            piece = spec.shard.rank * spec.replicate.size + run.start // spec.piece_numel
            ranks.append(spec.mesh.rank_of(piece))
        flat = [Place(run.start, run.stop, (run.stop - run.start,)) for run in found]
        cuts.append(Cuts(flat, one.shard.numel()) if flat else None)
    pairs = list(zip(held, keys, strict=True))
    params = [
        param
        for one, mine in pairs
        for param, key in zip(one.params, mine, strict=True)
        if key is not None
    ]
    counted = [_counted(one, mine, names) for one, mine in pairs]
    return Update(list(calls.values()), cuts, ranks, params, counted)


def _counted(
    held: Held, keys: Sequence[Key | None], names: Sequence[Sequence[str]]
) -> Tensor | None:
    """One more for each slot that is updated, if its group counts."""
    more = [key is not None and STEP in names[key.group] for key in keys]
    if not any(more):
        return None
    return held.steps.new_ones(()) if all(more) else held.steps.new_tensor(more)
