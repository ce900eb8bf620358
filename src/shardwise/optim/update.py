"""One optimizer step as a list of kernel calls on runs, decided before it is carried out.

torch's fused kernels update a list of tensors in one call. With one tensor for each parameter, the
Python that makes the list costs more than the arithmetic if parameters are small. So neighbouring
slots that are updated alike (same group, same count of steps, a gradient each) form one *run*:

            rank 0's piece    rank 1's
    slots | a a a b b b b b | b c c d d · e e |        c has no gradient, · is padding
    runs  | 1 1 1 1 1 1 1 1 | 2     3 3   4 4 |

A run ends where a rank's piece ends, even where one rank holds all pieces: a fused kernel rounds
the last elements of a buffer otherwise than those before them, so only runs that are the same in
every strategy give the same bits. Padding is in no run, so it is never updated.

Which parameters have a gradient, and how often each was updated, seldom changes from one step to
the next, so the calls and their slices are reused until it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.optim.flat_state import STEP, FlatState
from shardwise.plan.layout.layout import cut_at_multiples
from shardwise.plan.views import Views


class Run(NamedTuple):
    """Elements ``[start, stop)`` of a shard that are updated in one go."""

    start: int
    stop: int
    first: int  # the position of the slot in which it starts
    key: Any  # what its slots have in common


def runs(ranges: Sequence[tuple[int, int]], keys: Sequence[Any], piece: int) -> list[Run]:
    """The runs of a shard.

    Args:
        ranges: ``[start, stop)`` of each slot, in order; they do not overlap.
        keys: per slot, what must be equal within a run; ``None`` leaves the slot out.
        piece: elements of one rank's piece; a run does not cross its multiples.
    """
    listed: list[Run] = []
    for position, ((begin, end), key) in enumerate(zip(ranges, keys, strict=True)):
        if key is None:
            continue
        for start, stop in cut_at_multiples(begin, end, piece):
            last = listed[-1] if listed else None
            if last and last.stop == start and last.key == key and start % piece:
                listed[-1] = Run(last.start, stop, last.first, key)
            else:
                listed.append(Run(start, stop, position, key))
    return listed


class Key(NamedTuple):
    """Properties that slots have in common when they are updated in one call."""

    group: int  # the position of their parameter group
    is_first: bool  # was their state made for this step?
    age: float  # how often they were updated


@dataclass(frozen=True)
class Call:
    """One call of a fused kernel: runs of one dtype and one group, all new or none."""

    group: int  # the position of the parameter group
    is_first: bool  # was their state made for this step?
    params: list[Tensor] = field(default_factory=list)  # slices of shards, one for each run
    # The same slices of state, by name; 0-dim where it is one number.
    state: dict[str, list[Tensor]] = field(default_factory=dict)
    gradients: list[int] = field(default_factory=list)  # positions among those of all runs
    # Of each run, the position of its bucket, and where it starts in the shard of that.
    places: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Update:
    """One step."""

    calls: Sequence[Call]  # in any order
    views: Sequence[Views | None]  # of each bucket's flat gradient: its runs; None without runs
    ranks: Sequence[int]  # of every run, which rank sums the gradients of its piece
    params: Sequence[nn.Parameter]  # that are updated, also where this rank has no elements of it
    counted: Sequence[Tensor | None]  # of each bucket, what to add to its counts of steps

    @property
    def lasts(self) -> bool:
        """Would the next step be the same?"""
        return not any(call.is_first for call in self.calls)


def decide(
    flats: Sequence[FlatState], keys: Sequence[Sequence[Key | None]], names: Sequence[Sequence[str]]
) -> Update:
    """The step.

    Args:
        flats: the slots to update, by bucket.
        keys: of these slots; ``None`` for one without a gradient.
        names: the names of the state that each parameter group has.
    """
    calls: dict[tuple[torch.dtype, int, bool], Call] = {}
    views, ranks = list[Views | None](), list[int]()
    params, counted = list[nn.Parameter](), list[Tensor | None]()
    for at, (state, of_slots) in enumerate(zip(flats, keys, strict=True)):
        spec = state.bucket.spec
        of_bucket = runs(state.ranges, of_slots, spec.piece_numel)
        for run in of_bucket:
            group, is_first, _ = run.key
            call = calls.setdefault((state.shard.dtype, group, is_first), Call(group, is_first))
            call.params.append(state.shard[run.start : run.stop])
            for name in names[group]:
                slice_ = state.state_of_run(name, run.first, run.start, run.stop)
                call.state.setdefault(name, []).append(slice_)
            call.gradients.append(len(ranks))
            call.places.append((at, run.start))
            ranks.append(spec.summed_by(run.start))
        flat = [(run.start, run.stop, (run.stop - run.start,)) for run in of_bucket]
        views.append(Views(flat, state.shard.numel()) if flat else None)
        pairs = zip(state.params, of_slots, strict=True)
        params += [param for param, key in pairs if key is not None]
        counted.append(_counted(state, of_slots, names))
    return Update(list(calls.values()), views, ranks, params, counted)


def _counted(
    state: FlatState, keys: Sequence[Key | None], names: Sequence[Sequence[str]]
) -> Tensor | None:
    """One more for each slot that is updated, if its group counts."""
    more = [key is not None and STEP in names[key.group] for key in keys]
    if not any(more):
        return None
    return state.steps.new_ones(()) if all(more) else state.steps.new_tensor(more)
