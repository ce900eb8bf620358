"""State is flat and dense, what a parameter shows of it is a view, and others' values are taken."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.memory.shard_tensor.sharded_parameter import ShardedParameter
from shardwise.memory.sharding import sharding_of
from shardwise.optim.flat_state import STEP, FlatGradient, FlatState
from tests import nets
from tests.copies import error_text, local, on_ranks
from tests.nets import NETS, Net
from tests.steps import STRATEGIES, train


def some_of(sharded: sw.Sharded, every: int = 2) -> list[FlatState]:
    """The flat state of every other parameter of each bucket."""
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
                    state = held.state_of_run("moment", first, start + 1, stop)
                    assert state.tolist() == list(range(start + 1, stop))
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


def test_state_that_is_there_is_taken() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        for held in some_of(sharded, every=1):
            state, expected = new_state(), dict[nn.Parameter, Tensor]()
            for number, param in enumerate(held.params):
                sharding = sharding_of(param)
                assert sharding is not None
                whole = torch.randn(sharding.shape)
                expected[param] = sharding.cut(whole, param.shape)
                moment = expected[param].clone()
                state[param] = {STEP: torch.tensor(float(number)), "moment": moment, "note": "x"}
            held.take(state, [("moment",)])
            assert not held.is_recounted
            assert held.steps.tolist() == list(range(len(held.params)))
            for number, param in enumerate(held.params):
                mine = state[param]
                assert torch.equal(mine["moment"], expected[param])
                assert (mine[STEP], mine["note"]) == (number, "x")
            storages = {state[p]["moment"].untyped_storage().data_ptr() for p in held.params}
            assert len(storages) == 1

    on_ranks(3, nets.scalar_and_13_rows, rank)


def test_state_of_others_stays_as_it_is() -> None:
    held, state = some_of(sw.shard(nets.decoder()))[0], new_state()
    others = torch.ones(held.params[0].shape, dtype=torch.float64)
    state[held.params[0]] = {"moment": torch.ones(held.params[0].shape), "average": others}
    held.take(state, [("moment",)])
    assert state[held.params[0]]["average"] is others
    assert held.is_shown_by(state)


def test_state_of_another_shape_is_refused() -> None:
    held = some_of(sw.shard(nets.decoder()))[0]
    state = new_state()
    state[held.params[0]] = {"moment": torch.zeros(3, 5)}
    text = error_text(sw.OptimizerError, lambda: held.take(state, [("moment",)]))
    assert text == "state 'moment' is torch.Size([3, 5]), its shard torch.Size([37, 16])."


def test_a_count_that_somebody_else_changes_is_noticed() -> None:
    held, state = some_of(sw.shard(nets.decoder()))[0], new_state()
    held.add_missing(state, 0, (STEP,))
    held.count(torch.ones(()))
    recounted = [held.is_recounted]
    state[held.params[0]][STEP].fill_(7)
    recounted.append(held.is_recounted)
    assert recounted == [False, True]
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
        assert local(param).data_ptr() == held.values[at].data_ptr()
        assert type(param) is ShardedParameter
        assert torch.equal(
            sharded.local_state_dict()[held.bucket.members[held.indices[at]].name], expected
        )

    on_ranks(2, nets.decoder, rank)


def test_values_of_another_shape_are_refused() -> None:
    sharded = sw.shard(nets.decoder(), "no_shard")  # shards refuse them where they are assigned
    held = some_of(sharded)[0]
    held.params[0].data = torch.zeros(2, 2)
    text = error_text(sw.ConfigError, held.adopt)
    assert text.startswith("parameter 'embed.weight' was replaced by a tensor of shape (2, 2)")


# --- where gradients are views of one buffer, that buffer is used; else they are copied ------

DECODER = Net(nets.decoder, nets.decoder_batch)


def held_by(sharded: sw.Sharded) -> list[FlatState]:
    every = {id(p): 0 for p in sharded.model.parameters()}
    return [FlatState(bucket, every) for bucket in sharded.buckets if bucket.trainable]


def flat_gradient_of(held: FlatState) -> FlatGradient:
    gradients = [None if (grad := param.grad) is None else local(grad) for param in held.params]
    return held.flat_gradient(gradients)


def assert_right(held: FlatState, flat_gradient: FlatGradient) -> None:
    views = held.bucket.spec.rest_views(flat_gradient.flat)
    for param, view in zip(held.bucket.params, views, strict=True):
        assert param.grad is None or torch.equal(view, local(param.grad))


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("net", NETS, ids=str)
def test_after_a_backward_pass_nothing_is_copied(net: Net, world: int) -> None:
    """In every strategy, after accumulation, and after a second pass that adds to the first."""

    def rank(comm: Comm, model: nn.Module, strategy: str) -> None:
        sharded = sw.shard(model, strategy, comm=comm)
        with sharded.no_sync():
            train(model, net.batch(comm.rank, 2))
        for _ in range(2):
            train(model, net.batch(comm.rank, 2))
            for held in held_by(sharded):
                flat_gradient = flat_gradient_of(held)
                assert_right(held, flat_gradient)
                if any(held.params[at].grad is not None for at in held.solid):
                    assert flat_gradient.copied == ()
                    assert flat_gradient.flat.shape == held.shard.shape

    for strategy in STRATEGIES:
        on_ranks(world, net.build, lambda comm, model: rank(comm, model, strategy))  # noqa: B023


def swapped(model: nn.Module) -> None:
    """The right memory in the wrong places."""
    one, other = (model.get_parameter(f"blocks.0.attention.{n}.weight") for n in ("query", "key"))
    if one.shape == other.shape:
        one.grad, other.grad = other.grad, one.grad


def transposed(model: nn.Module) -> None:
    """The right address, and another order of elements."""
    weight = model.get_parameter("blocks.0.attention.query.weight")
    assert weight.grad is not None
    if weight.shape[0] == weight.shape[1]:
        weight.grad = local(weight.grad).t()


def expanded(model: nn.Module) -> None:
    bias = model.get_parameter("blocks.1.norm1.bias")
    bias.grad = torch.tensor(0.5).expand(bias.shape)


def cloned(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad = param.grad.clone()


def one_cloned(model: nn.Module) -> None:
    weight = model.get_parameter("blocks.2.mlp.up.weight")
    assert weight.grad is not None
    weight.grad = weight.grad.clone()


def cut_short(model: nn.Module) -> None:
    """All in one buffer with the right distances, which ends too early or begins too late."""
    params = [p for n, p in model.named_parameters() if n.startswith("blocks.1.")]
    grads = [local(p.grad) for p in params if p.grad is not None and p.nbytes]
    if not grads:
        return
    last = max(grads, key=Tensor.data_ptr)
    first = min(grads, key=Tensor.data_ptr)
    size = (last.data_ptr() - first.data_ptr()) // 4 + last.numel()
    memory = torch.empty(size)
    for param in params:
        if param.grad is not None and param.nbytes:
            at = (local(param.grad).data_ptr() - first.data_ptr()) // 4
            view = memory[at : at + param.shape.numel()].view(param.shape)
            param.grad = view.copy_(local(param.grad))


REPLACED: list[Callable[[nn.Module], None]] = [
    swapped, transposed, expanded, cloned, one_cloned, cut_short,
]  # fmt: skip


@pytest.mark.parametrize("replace", REPLACED, ids=lambda f: f.__name__)
def test_gradients_that_are_not_views_of_one_buffer_are_copied(
    replace: Callable[[nn.Module], None],
) -> None:
    def rank(comm: Comm, model: nn.Module, strategy: str) -> int:
        sharded = sw.shard(model, strategy, comm=comm)
        train(model, DECODER.batch(comm.rank, 2))
        replace(model)
        flat_gradients = {held: flat_gradient_of(held) for held in held_by(sharded)}
        for held, flat in flat_gradients.items():
            assert_right(held, flat)
        return sum(bool(flat.copied) for flat in flat_gradients.values())

    for strategy in ("no_shard", "full_shard"):
        ranks = on_ranks(2, DECODER.build, lambda comm, model: rank(comm, model, strategy))  # noqa: B023
        assert any(ranks), "nothing was replaced"


def test_what_becomes_of_a_copy_can_be_given_back() -> None:
    model = nets.decoder()
    sharded = sw.shard(model)
    train(model, DECODER.batch(0, 2))
    cloned(model)
    for held in held_by(sharded):
        before = [param.grad.clone() for param in held.params if param.grad is not None]
        flat_gradient = flat_gradient_of(held)
        flat_gradient.flat.mul_(0.5)
        flat_gradient.copy_back()
        after = [param.grad for param in held.params if param.grad is not None]
        assert all(torch.equal(a, b / 2) for a, b in zip(after, before, strict=True))
