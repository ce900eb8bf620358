"""One step on ranks that are threads, held against plain processes bit for bit, event by event.

A *step* is any function of a model and its batch that ends in ``backward()``. Its truth: each
rank's step on a plain copy of the model, then the gradients summed in rank order and divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.memory.sharding import sharding_of
from shardwise.plan.schedule.events import Event, Op
from tests.copies import local
from tests.nets import Batch, loss
from tests.parity.plain import Gradients, mean_in_rank_order
from tests.ranks import run_threads

Step = Callable[[nn.Module, Batch], None]

STRATEGIES = ("no_shard", "zero1", "shard_grad_op", "full_shard")


def train(model: nn.Module, batch: Batch) -> None:
    """The step that everybody expects."""
    loss(model, batch).backward()


def averaged(model: nn.Module, step: Step, batches: Sequence[Batch]) -> Gradients:
    """Whole gradients by name; ``None`` where no rank has one, zeros where some have none."""
    ranks = []
    for batch in batches:
        copy = deepcopy(model)
        step(copy, batch)
        ranks.append({name: param.grad for name, param in copy.named_parameters()})
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
            assert torch.equal(local(param.grad), sharding.cut(whole, param.shape)), name


def assert_at_rest(sharded: sw.Sharded) -> None:
    """Nothing is gathered, nothing is collected, and memory that may go has gone."""
    split = sharded.placement.splits and sharded.comm.size > 1
    for bucket in sharded.buckets:
        assert not bucket.gathered, bucket.unit
        assert bucket.gradients.full is None, bucket.unit
        if split and not (sharded.placement.resident or bucket.allocation.shared):
            assert bucket.full.untyped_storage().nbytes() == 0, bucket.unit
        views = bucket.spec.rest_views(bucket.shard)
        for param, view in zip(bucket.params, views, strict=True):
            assert local(param).data_ptr() == view.data_ptr()


@dataclass
class Recorder:
    """What a sharded model really does, event by event."""

    sharded: sw.Sharded
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sharded.runtime.listeners.append(self.events.append)

    def take(self) -> tuple[Event, ...]:
        """The events since the last time; each is a collective, if it says so."""
        taken = tuple(self.events)
        self.events.clear()
        calls, units = self.sharded.comm.counters.calls, self.sharded.runtime.units
        if self.sharded.comm.size > 1 and self.sharded.placement.splits:
            gathered = [b for name in units_of(taken, Op.GATHER) for b in units[name].buckets]
            again = [bucket for bucket in gathered if not bucket.spec.kept]  # others only once
            assert len(again) <= calls.get("gather", 0) <= len(gathered)
        if self.sharded.comm.size > 1:
            reduced = [len(units[name].trainable) for name in units_of(taken, Op.REDUCE)]
            assert sum(reduced) == calls.get("reduce", 0)
        self.sharded.comm.counters.reset()
        return taken


@dataclass(frozen=True)
class Taken:
    """A step: the schedule just before it, and what happened."""

    listed: tuple[Event, ...]
    done: tuple[Event, ...]

    @property
    def follows(self) -> bool:
        return self.done == self.listed

    @property
    def on_demand(self) -> list[Event]:
        return [event for event in self.done if event.reason == "on demand"]


def play(
    model: nn.Module, steps: Sequence[Step], batches: Sequence[Batch], **options: Any
) -> list[Taken]:
    """Take ``steps`` on copies of ``model``, sharded over as many ranks as there are batches.

    Each step's gradients are the truth's, all is at rest after it, every event was a collective
    and every collective an event, and all ranks did the same.
    """
    truths = [averaged(model, step, batches) for step in steps]
    models = [deepcopy(model) for _ in batches]

    def rank(comm: Comm) -> list[Taken]:
        mine = models[comm.rank]
        sharded = sw.shard(mine, comm=comm, **options)
        comm.counters.reset()
        recorder, taken = Recorder(sharded), []
        for step, truth in zip(steps, truths, strict=True):
            listed = sharded.schedule.events
            step(mine, batches[comm.rank])
            taken.append(Taken(listed, recorder.take()))
            assert_gradients(mine, truth)
            assert_at_rest(sharded)
            mine.zero_grad()
        return taken

    ranks = run_threads(len(batches), rank)
    assert all(taken == ranks[0] for taken in ranks)
    return ranks[0]


def units_of(events: Sequence[Event], op: Op) -> list[str]:
    return [event.unit for event in events if event.op is op]
