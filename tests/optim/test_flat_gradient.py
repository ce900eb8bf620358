"""Where gradients are views of one buffer, that buffer is used; else they are copied together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.optim.flat_state import FlatGradient, FlatState
from tests import nets
from tests.copies import local, on_ranks
from tests.nets import NETS, Net
from tests.steps import STRATEGIES, train

DECODER = Net(nets.decoder, nets.decoder_batch)


def held_by(sharded: sw.Sharded) -> list[FlatState]:
    every = {id(p): 0 for p in sharded.model.parameters()}
    return [FlatState(bucket, every) for bucket in sharded.buckets if bucket.trainable]


def seen(held: FlatState) -> FlatGradient:
    gradients = [None if (grad := param.grad) is None else local(grad) for param in held.params]
    return held.flat_gradient(gradients)


def assert_right(held: FlatState, found: FlatGradient) -> None:
    views = held.bucket.spec.rest_views(found.flat)
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
                found = seen(held)
                assert_right(held, found)
                if any(held.params[at].grad is not None for at in held.solid):
                    assert found.copied == ()
                    assert found.flat.shape == held.shard.shape

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
    grads = [local(p.grad) for p in params if p.grad is not None and p.grad.numel()]
    if not grads:
        return
    last = max(grads, key=Tensor.data_ptr)
    first = min(grads, key=Tensor.data_ptr)
    size = (last.data_ptr() - first.data_ptr()) // 4 + last.numel()
    memory = torch.empty(size)
    for param in params:
        if param.grad is not None and param.grad.numel():
            at = (param.grad.data_ptr() - first.data_ptr()) // 4
            view = memory[at : at + param.grad.numel()].view(param.grad.shape)
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
        found = {held: seen(held) for held in held_by(sharded)}
        for held, flat in found.items():
            assert_right(held, flat)
        return sum(bool(flat.copied) for flat in found.values())

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
        found = seen(held)
        found.flat.mul_(0.5)
        found.copy_back()
        after = [param.grad for param in held.params if param.grad is not None]
        assert all(torch.equal(a, b / 2) for a, b in zip(after, before, strict=True))
