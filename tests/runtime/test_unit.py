"""A unit at work: several buckets that are gathered, reduced and forgotten together."""

from __future__ import annotations

import torch

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.comm.transports.local import LocalComm
from shardwise.plan.schedule.events import Op, UnitBytes
from shardwise.runtime.unit import UnitState
from tests.fake import FakeComm
from tests.nets import mostly_frozen, mostly_frozen_batch
from tests.steps import assert_at_rest, train
from tests.watched import Late


def block(comm: Comm, strategy: str = "full_shard") -> tuple[sw.Sharded, UnitState]:
    """A unit of a frozen and a trainable bucket."""
    sharded = sw.shard(mostly_frozen(), strategy, comm=comm)
    return sharded, sharded.runtime.units["blocks.0"]


def carry_out(state: UnitState, op: Op) -> None:
    for act in state.actions[op]:
        act()


def test_a_unit_with_frozen_parameters_has_a_bucket_that_is_never_reduced() -> None:
    _, state = block(LocalComm())
    assert [bucket.trainable for bucket in state.buckets] == [False, True]
    assert state.trainable == [state.buckets[1]]


def test_all_buckets_are_gathered_and_freed_together() -> None:
    _, state = block(FakeComm(0, 2))
    carry_out(state, Op.GATHER)
    assert all(bucket.gathered for bucket in state.buckets)
    for bucket in state.buckets:
        bucket.ready()
    assert all(bucket.is_whole for bucket in state.buckets)
    state.free()
    assert not any(bucket.gathered for bucket in state.buckets)


def test_its_bytes_are_those_of_all_buckets_and_of_trainable_gradients_padding_included() -> None:
    precision = sw.Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)
    sharded = sw.shard(mostly_frozen(), comm=FakeComm(0, 2), precision=precision)
    state = sharded.runtime.units["blocks.0"]
    frozen, trainable = (bucket.layout.numel for bucket in state.buckets)
    gathered, gradients = 2 * (frozen + trainable), 8 * trainable
    sent = {"gather_sent": gathered // 2, "reduce_sent": gradients // 2}  # of two ranks
    assert state.nbytes() == UnitBytes(gathered, gradients, **sent)


def test_copies_spread_means_as_stored_or_join_what_is_trained_as_it_is_computed_in() -> None:
    precision = sw.Precision(param_dtype=torch.bfloat16)
    units = {}
    for strategy in ("hybrid_shard", "hybrid_full"):
        comm = FakeComm(0, 6)
        sharded = sw.shard(mostly_frozen(), strategy, comm=comm, mesh=(3, 2), precision=precision)
        units[strategy] = sharded.runtime.units["blocks.0"]
    _, trained = (bucket.layout.numel for bucket in units["hybrid_full"].buckets)
    spread, joined = (units[strategy].nbytes() for strategy in units)
    assert (spread.spread, spread.joined) == (4 * trained, 0)
    assert (joined.spread, joined.joined) == (0, 2 * trained)


def test_it_is_complete_when_every_gradient_of_its_last_visit_has_come() -> None:
    sharded, state = block(LocalComm())
    [bucket] = state.trainable
    complete = []
    for index, param in enumerate(bucket.params):
        complete.append(state.complete)
        bucket.gradients.collect(index, torch.ones_like(param), carried=False)
    assert [*complete, state.complete] == [*[False] * len(bucket.params), True]
    collected = [state.collected]
    sharded.drop_gradients()
    assert [*collected, state.collected] == [True, False]


def test_an_abandoned_unit_is_at_rest_and_waits_for_nothing() -> None:
    sharded, state = block(FakeComm(1, 2))
    carry_out(state, Op.GATHER)
    state.trainable[0].gradients.collect(
        0, torch.ones(state.trainable[0].layout.slots[0].shape), carried=True
    )
    state.abandon(drops=True)
    assert_at_rest(sharded)
    train(sharded.model, mostly_frozen_batch(0, 2))
    assert_at_rest(sharded)


def test_what_copies_have_written_to_a_unit_is_joined_once() -> None:
    sharded = sw.shard(mostly_frozen(), "hybrid_full", comm=FakeComm(0, 4), mesh=(2, 2))
    state = sharded.runtime.units["blocks.0"]
    counters = state.buckets[0].mesh.replicate.counters
    counters.reset()
    state.expire(steps_only=False)
    carry_out(state, Op.UPDATE)
    carry_out(state, Op.UPDATE)
    assert counters.calls == {"update": 1}  # the other bucket is frozen


def test_ranks_that_map_one_bucket_wait_before_and_after_one_of_them_keeps_what_it_wrote() -> None:
    comm = Late(0, 2)
    comm.memory.shared = True
    _, state = block(comm)
    comm.fences.clear()
    for bucket in state.buckets:
        bucket.ready()
    with torch.no_grad():
        for bucket in state.buckets:
            bucket.params[0].fill_(3.0)
    state.free()
    assert comm.fences == ["fence written or detached parameters"] * 2
    assert (state.trainable[0].shard == 3.0).any()
    for bucket in state.buckets:
        bucket.ready()
    state.free()
    carry_out(state, Op.GATHER)  # and never used
    state.free()
    assert comm.fences == ["fence written or detached parameters"] * 2
