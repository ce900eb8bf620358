"""From autograd to ``shard.grad``: each gradient is written once, where it is sent from."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.local import LocalComm
from shardwise.comm.protocol import Comm
from shardwise.guard import sharding_of
from shardwise.schedule import Op
from tests.nets import (
    NETS,
    Batch,
    Net,
    decoder,
    decoder_batch,
    loss,
    numbers,
    tokens,
    unused_expert,
    unused_expert_batch,
)
from tests.parity.plain import mean_in_rank_order
from tests.ranks import run_threads
from tests.steps import STRATEGIES, assert_at_rest, assert_gradients, averaged, play, train
from tests.watched import Watched
from tests.written import Written, storage

WORLDS = (1, 2, 3)


# ---- what is there already ---------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_that_is_there_is_set_aside_and_added_to(strategy: str, world: int) -> None:
    models = [decoder()]
    models += [deepcopy(models[0]) for _ in range(world - 1)]
    batches = [decoder_batch(rank, 2) for rank in range(world)]
    truth = averaged(models[0], train, batches)

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        sw.shard(model, strategy, comm=comm)
        before = {name: torch.full_like(p, 0.25) for name, p in model.named_parameters()}
        for name, param in model.named_parameters():
            param.grad = before[name]
        train(model, batches[comm.rank])
        for name, param in model.named_parameters():
            assert param.grad is before[name]
        quarter = {n: None if g is None else torch.full_like(g, 0.25) + g for n, g in truth.items()}
        assert_gradients(model, quarter)

    run_threads(world, rank)


def test_the_backward_pass_does_not_see_the_shards_gradient() -> None:
    """Autograd would refuse to add a whole gradient to one of the shard's shape."""
    models = [nn.Linear(5, 3), nn.Linear(5, 3)]

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        sw.shard(model, wrap=sw.wrap.whole(), comm=comm)
        seen: list[Tensor | None] = []
        for _ in range(2):
            out = model(numbers(0, (2, 5)))
            out.register_hook(lambda grad: seen.append(None))
            out.sum().backward()
            assert model.weight.grad is not None
            assert model.weight.grad.shape == model.weight.shape
        assert seen == [None, None]

    run_threads(2, rank)


def test_a_gradient_from_before_shard_is_cut_and_kept() -> None:
    models = [nn.Linear(5, 3), nn.Linear(5, 3)]
    for model in models:
        model.weight.grad = torch.arange(15.0).view(3, 5)

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        sw.shard(model, wrap=sw.wrap.whole(), comm=comm)
        sharding = sharding_of(model.weight)
        assert sharding is not None
        assert model.weight.grad is not None
        whole = torch.arange(15.0).view(3, 5)
        assert torch.equal(model.weight.grad, sharding.cut(whole, model.weight.shape))

    run_threads(2, rank)


def test_zeroed_gradients_stay_tensors_and_are_added_to() -> None:
    """``zero_grad(set_to_none=False)`` keeps the memory."""

    def step(model: nn.Module, batch: Batch) -> None:
        train(model, batch)
        model.zero_grad(set_to_none=False)
        train(model, batch)

    play(decoder(), [step] * 2, [decoder_batch(rank, 2) for rank in range(2)])


# ---- one pass ----------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("net", NETS, ids=str)
def test_gradients_reach_their_bucket_in_one_pass(net: Net, strategy: str, world: int) -> None:
    """Counted twice. Besides, only what has no gradient is written: padding, unused ones."""
    models = [net.build() for _ in range(world)]

    def rank(comm: Comm) -> None:
        watched = Watched(comm)
        sharded = sw.shard(models[comm.rank], strategy, comm=watched)
        train(sharded.model, net.batch(comm.rank, 2))
        sharded.model.zero_grad()
        watched.allocated.clear()
        buckets = [bucket for bucket in sharded.buckets if bucket.trainable]
        before = sum(bucket.gradients.copied for bucket in buckets)
        with Written() as written:
            train(sharded.model, net.batch(comm.rank, 2))
        copied = sum(bucket.gradients.copied for bucket in buckets) - before
        used = sum(s.slots_used(p.grad is not None) for s, p in slots(sharded))
        lengths = {bucket.layout.numel for bucket in buckets}
        full = [memory for memory in watched.allocated if memory.numel() in lengths]
        found = written.into(*full)
        assert copied == used
        assert found.pop("copy_") == copied
        assert found.pop("zero_", 0) <= sum(b.layout.numel * 4 for b in buckets) - copied
        assert found.keys() <= {"div_"}  # the mean, where the shard is the bucket

    run_threads(world, rank)


