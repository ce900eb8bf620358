"""What plain processes compute: the truth that a sharded step is held against, bit for bit.

A *step* is any function of a model and its batch that ends in ``backward()``. Its truth: each
rank's step on a plain copy of the model, then the gradients summed in rank order and divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.guard import sharding_of
from shardwise.schedule import Event, Op
from tests.nets import Batch, loss
from tests.parity.plain import mean_in_rank_order
from tests.ranks import run_threads

Step = Callable[[nn.Module, Batch], None]
Gradients = Mapping[str, Tensor | None]

STRATEGIES = ("no_shard", "zero1", "shard_grad_op", "full_shard")


def train(model: nn.Module, batch: Batch) -> None:
    """The step that everybody expects."""
    loss(model, batch).backward()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: param.grad for name, param in model.named_parameters()}


def averaged(model: nn.Module, step: Step, batches: Sequence[Batch]) -> Gradients:
    """Whole gradients by name; ``None`` where no rank has one, zeros where some have none."""
    ranks = []
    for batch in batches:
        copy = deepcopy(model)
        step(copy, batch)
        ranks.append(gradients(copy))
    return mean_in_rank_order(ranks)


def assert_gradients(model: nn.Module, expected: Gradients) -> None:
    """This rank's gradients are, bit for bit, its part of the expected ones."""
    for name, param in model.named_parameters():
        whole, sharding = expected[name], sharding_of(param)
        assert sharding is not None
        if whole is None:
            assert param.grad is None, name
        else:
            assert param.grad is not None, name
            assert torch.equal(param.grad, sharding.cut(whole, param.shape)), name


def assert_at_rest(sharded: sw.Sharded) -> None:
    """Nothing is gathered, nothing is collected, and what may go has gone."""
    split = sharded.placement.splits and sharded.comm.size > 1
    for bucket in sharded.buckets:
        assert not bucket.gathered, bucket.unit
        assert bucket.gradients.full is None, bucket.unit
        if split and not sharded.placement.resident:
            assert bucket.full.untyped_storage().nbytes() == 0, bucket.unit
        for index, param in enumerate(bucket.params):
            assert param.data_ptr() == bucket.spec.rest_views(bucket.shard)[index].data_ptr()


def on_demand(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.reason == "on demand"]


@dataclass
class Recorder:
    """What a sharded model really did, event by event."""

    sharded: sw.Sharded
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sharded.runtime.listeners.append(self.events.append)

    def take(self) -> tuple[Event, ...]:
        """The events since the last time."""
        taken = tuple(self.events)
        self.events.clear()
        return taken


def follows(
    model: nn.Module,
    step: Step,
    batches: Sequence[Batch],
    steps: int = 3,
    **options: Any,
) -> list[tuple[tuple[Event, ...], ...]]:
    """Take ``steps`` equal steps, sharded over as many ranks as there are batches.

    Each step is held against the truth; nothing stays gathered after it; the ranks do the same;
    and from the second step on, what runs is what the schedule said before it.

    Returns:
        Per rank and step, what happened.
    """
    truth = averaged(model, step, batches)
    models = [deepcopy(model) for _ in batches]

    def rank(comm: Comm) -> tuple[tuple[Event, ...], ...]:
        mine = models[comm.rank]
        sharded = sw.shard(mine, comm=comm, **options)
        recorder, taken = Recorder(sharded), []
        for number in range(steps):
            said = sharded.schedule.events
            step(mine, batches[comm.rank])
            taken.append(recorder.take())
            if number > 0:
                assert taken[-1] == said
                assert not on_demand(taken[-1])
            assert_gradients(mine, truth)
            assert_at_rest(sharded)
            mine.zero_grad()
        return tuple(taken)

    ranks = run_threads(len(batches), rank)
    assert all(found == ranks[0] for found in ranks)
    return ranks


def units_of(events: Sequence[Event], op: Op) -> list[str]:
    return [event.unit for event in events if event.op is op]
