"""State is flat and dense, what a parameter shows of it is a view, and others' values are taken."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.guard import ShardedParameter
from shardwise.optim.flat_state import STEP, FlatState
from shardwise.sharding import sharding_of
from tests import nets
from tests.copies import local, on_ranks, said
from tests.steps import STRATEGIES


def some_of(sharded: sw.Sharded, every: int = 2) -> list[FlatState]:
    """Of each bucket, every other parameter."""
    params = list(sharded.model.parameters())[::every]
    return [h for b in sharded.buckets if (h := FlatState(b, {id(p): 0 for p in params})).params]


def new_state() -> Any:
    return defaultdict(dict)


def test_each_slot_is_where_its_parameter_is() -> None:
    def rank(comm: Comm, model: nn.Module, strategy: str) -> None:
        for held in some_of(sw.shard(model, strategy, comm=comm)):
            held.shard.copy_(torch.arange(held.shard.numel()))
            for param, (start, stop) in zip(held.params, held.ranges, strict=True):
                assert local(param).flatten().tolist() == list(range(start, stop))
            assert held.ranges == sorted(held.ranges)

    for strategy in STRATEGIES:
        on_ranks(3, nets.scalar_and_13_rows, lambda c, m: rank(c, m, strategy))  # noqa: B023


def test_flat_state_has_no_padding_and_nothing_of_others() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        for held in some_of(sw.shard(model, comm=comm)):
            views = [held.state("moment", at) for at in range(len(held.params))]
            assert [view.shape for view in views] == [param.shape for param in held.params]
            storage = views[0].untyped_storage()
            assert storage.nbytes() == sum(view.nbytes for view in views)
            for number, view in enumerate(views):
                view.fill_(number)
            assert all(bool((view == n).all()) for n, view in enumerate(views))

    on_ranks(3, nets.scalar_and_13_rows, rank)


def test_the_state_of_a_run_is_that_of_its_slots() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        for held in some_of(sw.shard(model, comm=comm), every=1):
            for at, (start, stop) in enumerate(held.ranges):
                held.state("moment", at).copy_(
                    torch.arange(start, stop).view(held.values[at].shape)
                )
            for first, (start, stop) in enumerate(held.ranges):
                if stop - start > 2:
                    found = held.state_of_run("moment", first, start + 1, stop)
                    assert found.tolist() == list(range(start + 1, stop))
                    assert held.state_of_run(STEP, first, start + 1, stop).shape == ()

    on_ranks(2, nets.decoder, rank)


def test_missing_state_is_made_of_zeros_once() -> None:
    sharded = sw.shard(nets.decoder())
    held, state = some_of(sharded)[0], new_state()
    param = held.params[0]
    assert held.add_missing(state, 0, (STEP, "moment"))
    assert not held.add_missing(state, 0, (STEP, "moment"))
    assert list(state) == [param]
    assert state[param][STEP] == 0
    assert state[param]["moment"].shape == param.shape
    assert not state[param]["moment"].any()
    assert held.add_missing(state, 0, (STEP, "moment", "another"))


def test_state_that_is_there_is_taken_whole_or_cut() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        for held in some_of(sharded, every=1):
            state, expected = new_state(), dict[nn.Parameter, Tensor]()
            for number, param in enumerate(held.params):
                sharding = sharding_of(param)
                assert sharding is not None
                whole = torch.randn(sharding.shape)
                expected[param] = sharding.cut(whole, param.shape)
                given = whole if number % 2 else expected[param].clone()
                state[param] = {STEP: torch.tensor(float(number)), "moment": given, "note": "x"}
            held.take(state)
            assert not held.is_recounted
            assert held.steps.tolist() == list(range(len(held.params)))
            for number, param in enumerate(held.params):
                mine = state[param]
                assert torch.equal(mine["moment"], expected[param])
                assert (mine[STEP], mine["note"]) == (number, "x")
            storages = {state[p]["moment"].untyped_storage().data_ptr() for p in held.params}
            assert len(storages) == 1

    on_ranks(3, nets.scalar_and_13_rows, rank)


def test_state_of_another_shape_is_refused() -> None:
    held = some_of(sw.shard(nets.decoder()))[0]
    state = new_state()
    state[held.params[0]] = {"moment": torch.zeros(3, 5)}
    text = said(sw.ConfigError, lambda: held.take(state))
    assert text == (
        "state 'moment' of parameter 'embed.weight' has shape (3, 5); the shard here is (37, 16), "
        "so it is another rank's, or of another world size. Load this rank's own state, or whole "
        "state."
    )


def test_a_count_that_somebody_else_changes_is_noticed() -> None:
    held, state = some_of(sw.shard(nets.decoder()))[0], new_state()
    held.add_missing(state, 0, (STEP,))
    held.count(torch.ones(()))
    seen = [held.is_recounted]
    state[held.params[0]][STEP].fill_(7)
    seen.append(held.is_recounted)
    assert seen == [False, True]
    assert held.steps[0] == 7


def test_values_put_in_place_of_a_shard_are_taken_over() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        held = max(some_of(sharded), key=lambda held: len(held.solid))
        at = held.solid[0]
        param = held.params[at]
        param.data = param.detach() * 2
        expected = local(param).clone()
        with torch._C.DisableTorchFunctionSubclass():
            held.adopt()
        assert torch.equal(held.values[at], expected)
        assert param.data_ptr() == held.values[at].data_ptr()
        assert type(param) is ShardedParameter
        assert torch.equal(
            sharded.local_state_dict()[held.bucket.members[held.indices[at]].name], expected
        )

    on_ranks(2, nets.decoder, rank)


def test_values_of_another_shape_are_refused() -> None:
    sharded = sw.shard(nets.decoder())
    held = some_of(sharded)[0]
    held.params[0].data = torch.zeros(2, 2)
    text = said(sw.ConfigError, held.adopt)
    assert text.startswith("parameter 'embed.weight' was replaced by a tensor of shape (2, 2)")
