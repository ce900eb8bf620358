"""Hooks of users on a parameter's gradient, beside ours."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.comm.transports.local import LocalComm
from shardwise.memory.grad_hooks import Arrivals, is_handed_out
from shardwise.memory.sharding import sharding_of
from tests.copies import assert_near, local
from tests.nets import Batch, decoder, decoder_batch, loss
from tests.parity.plain import put_gradients
from tests.ranks import run_sharing, run_threads
from tests.steps import STRATEGIES, assert_gradients, averaged, play, train

Seen = dict[str, Tensor]


def note(gradients: Seen, name: str, param: Tensor) -> None:
    assert param.grad is not None
    gradients[name] = param.grad.clone()


def noted(model: nn.Module, gradients: Seen) -> None:
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(partial(note, gradients, name))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_hook_after_a_gradient_sees_the_mean_that_the_shard_has(strategy: str, when: str) -> None:
    """As under FSDP2, whether it was there before ``shard()`` or came after it."""
    models, batches = [decoder()], [decoder_batch(rank, 2) for rank in range(2)]
    models.append(deepcopy(models[0]))
    mean = averaged(models[0], train, batches)

    def rank(comm: Comm) -> None:
        model, gradients = models[comm.rank], Seen()
        noted(model, gradients) if when == "before" else None
        sharded = sw.shard(model, strategy, comm=comm)
        noted(model, gradients) if when == "after" else None
        with sharded.accumulate(last=False):
            train(model, batches[comm.rank])
        assert not gradients  # they are this rank's alone
        sharded.drop_gradients()
        train(model, batches[comm.rank])
        for name, param in model.named_parameters():
            sharding, whole = sharding_of(param), mean[name]
            assert sharding is not None
            assert whole is not None
            assert torch.equal(local(gradients[name]), sharding.cut(whole, param.shape)), name
        assert_gradients(model, mean)

    run_threads(2, rank)


def test_a_hook_on_a_gradient_sees_all_of_this_ranks_and_may_change_it() -> None:
    """As under DDP: ``register_hook`` is called before gradients are averaged."""

    def step(model: nn.Module, batch: Batch) -> None:
        handles = [param.register_hook(lambda grad: grad * 0.5) for param in model.parameters()]
        loss(model, batch).backward()
        for handle in handles:
            handle.remove()

    play(decoder(), [step] * 2, [decoder_batch(rank, 2) for rank in range(2)])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("run", [run_threads, run_sharing])
def test_an_optimizer_steps_in_backward(run: Callable[..., list[Any]], strategy: str) -> None:
    """One for each parameter, so that a gradient goes as soon as it was used."""
    models, batches = [decoder()], [decoder_batch(rank, 2) for rank in range(2)]
    models.append(deepcopy(models[0]))
    plain = deepcopy(models[0])
    ours = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-4)
    for _ in range(3):
        put_gradients(plain, averaged(plain, train, batches))
        ours.step()

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        sw.shard(model, strategy, comm=comm)
        each = {p: torch.optim.AdamW([p], lr=0.01, eps=1e-4) for p in model.parameters()}

        def update(param: Tensor) -> None:
            each[param].step()  # type: ignore[index]
            each[param].zero_grad()  # type: ignore[index]

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(update)
        for _ in range(3):
            train(model, batches[comm.rank])
            assert all(param.grad is None for param in model.parameters())
        state = model.state_dict()
        for name, value in plain.named_parameters():
            assert_near(state[name], value.detach(), 2e-5)

    run(2, rank)


def test_hooks_from_before_shard_are_called_once_and_can_be_removed() -> None:
    model, calls = nn.Linear(3, 2), list[str]()
    kept, removed = (
        model.weight.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
        for name in ("kept", "gone")
    )
    sharded = sw.shard(model, comm=LocalComm())
    removed.remove()
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    sharded.unshard()
    model(torch.ones(1, 3)).sum().backward()
    sw.shard(model, comm=LocalComm())
    model(torch.ones(1, 3)).sum().backward()
    kept.remove()
    model(torch.ones(1, 3)).sum().backward()
    assert calls == ["kept"] * 4


def test_autograd_says_whether_it_returns_a_gradient_or_adds_it() -> None:
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    answers: list[bool | None] = []

    def ask(_: Tensor) -> None:
        answers.append(is_handed_out(weight))

    value = (weight * 2).sum()
    value.register_hook(ask)
    value.backward(retain_graph=True)
    torch.autograd.grad(value, weight, retain_graph=True)
    value = (weight * other).sum()
    value.register_hook(ask)
    torch.autograd.grad(value, other)
    assert answers == [False, True, None]


def test_small_gradients_are_held_until_the_last_of_them_which_is_told() -> None:
    params, arrived = [nn.Parameter(torch.zeros(1)) for _ in range(3)], list[int]()
    arrivals = Arrivals(params, [1, 1, 1])
    arrivals.tell = lambda param: arrived.append(id(param))
    arrivals.hold(True, due=2)
    for param in params:
        arrivals(param)
    assert [*map(id, arrivals)] == [*map(id, params[:2])]
    assert arrived == [id(params[2])]
