"""Hooks of users on a parameter's gradient, beside ours."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.local import LocalComm
from shardwise.comm.protocol import Comm
from shardwise.memory.grad_hooks import is_handed_out
from tests.nets import Batch, decoder, decoder_batch, loss
from tests.ranks import run_threads
from tests.steps import STRATEGIES, play, train

Seen = dict[str, Tensor]


def note(seen: Seen, name: str, param: Tensor) -> None:
    assert param.grad is not None
    seen[name] = param.grad.clone()


def noted(model: nn.Module, seen: Seen) -> None:
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(partial(note, seen, name))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_hook_on_a_gradient_sees_all_of_this_ranks_gradient(strategy: str, when: str) -> None:
    """As under DDP, whether it was there before ``shard()`` or came after it."""
    models = [decoder()]
    models.append(deepcopy(models[0]))
    plain = deepcopy(models)

    def rank(comm: Comm) -> None:
        model, batch, seen = models[comm.rank], decoder_batch(comm.rank, 2), Seen()
        noted(model, seen) if when == "before" else None
        sw.shard(model, strategy, comm=comm)
        noted(model, seen) if when == "after" else None
        train(model, batch)
        train(plain[comm.rank], batch)
        for name, param in plain[comm.rank].named_parameters():
            assert param.grad is not None
            assert torch.equal(seen[name], param.grad), name

    run_threads(2, rank)


def test_what_a_hook_makes_of_a_gradient_is_what_is_averaged() -> None:
    def step(model: nn.Module, batch: Batch) -> None:
        handles = [param.register_post_accumulate_grad_hook(halve) for param in model.parameters()]
        loss(model, batch).backward()
        for handle in handles:
            handle.remove()

    def halve(param: Tensor) -> None:
        assert param.grad is not None
        param.grad = param.grad * 0.5

    play(decoder(), [step] * 2, [decoder_batch(rank, 2) for rank in range(2)])


def test_hooks_from_before_shard_are_called_once_and_can_be_removed() -> None:
    model, calls = nn.Linear(3, 2), list[str]()
    kept, gone = (
        model.weight.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
        for name in ("kept", "gone")
    )
    sharded = sw.shard(model, comm=LocalComm())
    gone.remove()
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
