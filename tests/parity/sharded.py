"""The same training on shards, and the comparison with the plain one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests.copies import local
from tests.parity.plain import Gradients, Plain, Recipe
from tests.ranks import run_threads


@dataclass(frozen=True)
class How:
    """How a recipe is carried out on shards.

    Attributes:
        strategy, wrap, options: of ``sw.shard``.
        each_rank: more options, from the rank's comm.
        syncs_always: reduce after every micro-batch instead of after a step's last one.
        clip: the largest gradient norm.
        dress: changes a rank's model before it is sharded.
        optimizer: from the handle, instead of the recipe's.
    """

    strategy: str = "full_shard"
    wrap: sw.wrap.Wrap | None = None
    options: dict[str, Any] = field(default_factory=dict)
    each_rank: Callable[[Comm], dict[str, Any]] = lambda comm: {}
    syncs_always: bool = False
    clip: float | None = None
    dress: Callable[[nn.Module], object] = lambda model: None
    optimizer: Callable[[sw.Sharded], torch.optim.Optimizer] | None = None

    def by(self, strategy: str) -> How:
        """The same with another strategy."""
        return replace(self, strategy=strategy)


@dataclass(frozen=True)
class Sharded:
    """What one rank saw. ``gradients``: its shards of each step's. ``norms``: if it clipped."""

    losses: list[float]
    gradients: list[Gradients]
    state: dict[str, Tensor]
    norms: list[float]
    dtypes: set[torch.dtype]  # of parameters, gradients and optimizer state at rest


def train(comm: Comm, model: nn.Module, recipe: Recipe, how: How) -> Sharded:
    """One rank's part of ``recipe``."""
    how.dress(model)
    options = {**how.options, **how.each_rank(comm)}
    sharded = sw.shard(model, how.strategy, how.wrap, comm, **options)
    if how.optimizer is None:
        optimizer = recipe.optimizer(model.parameters())
    else:
        optimizer = how.optimizer(sharded)
    losses, gradients, norms = list[float](), list[Gradients](), list[float]()
    for step in range(recipe.steps):
        batches = recipe.batches(step, comm.rank)
        for number, batch in enumerate(batches, start=1):
            with sharded.accumulate(last=how.syncs_always or number == len(batches)):
                value = recipe.loss(model, batch)
                (value / recipe.micro).backward()
            losses.append(value.item())
        gradients.append({name: _copy(p.grad) for name, p in model.named_parameters()})
        if how.clip is not None:
            norms.append(sharded.clip_grad_norm_(how.clip).item())
        optimizer.step()
        optimizer.zero_grad()
    tensors = [p.data for p in model.parameters() if p.requires_grad]
    tensors += [s for state in optimizer.state.values() for s in state.values() if s.ndim]
    tensors += [g for step in gradients for g in step.values() if g is not None]
    dtypes = {tensor.dtype for tensor in tensors}
    return Sharded(losses, gradients, model.state_dict(), norms, dtypes)


def on_threads(world: int, recipe: Recipe, how: How) -> list[Sharded]:
    """``train`` on ``world`` threads. Generators are the process's: all models are built first."""
    models = [recipe.model() for _ in range(world)]
    return run_threads(world, lambda comm: train(comm, models[comm.rank], recipe, how))


def whole_gradients(ranks: Sequence[Sharded], step: int, strategy: str) -> Gradients:
    """Each parameter's gradient of ``step``: the ranks' shards, flat, one behind the other.

    Nothing is asked of the layout: ranks hold ranges in rank order, without gaps or overlaps.
    """
    parts = [rank.gradients[step] for rank in ranks]
    if strategy == "no_shard":
        for part in parts[1:]:
            assert differing(part, parts[0]) == []
        parts = parts[:1]
    return {name: _joined([part[name] for part in parts]) for name in parts[0]}


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    some = [part.flatten() for part in parts if part is not None]
    assert len(some) in (0, len(parts)), "ranks must agree on which parameters have a gradient"
    return torch.cat(some) if some else None


def flat(gradients: Gradients) -> Gradients:
    return {name: None if g is None else g.flatten() for name, g in gradients.items()}


def differing(some: Gradients, others: Gradients) -> list[str]:
    """The names whose values are not equal, bit for bit (but a zero may have either sign)."""
    assert some.keys() == others.keys()
    return [name for name, value in some.items() if not _equal(value, others[name])]


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


def assert_equal(ranks: Sequence[Sharded], plain: Plain, strategy: str) -> None:
    """Losses, every step's gradients, and every parameter and buffer of every rank: bit-equal."""
    assert [rank.losses for rank in ranks] == plain.losses
    for step, expected in enumerate(plain.gradients):
        gradients = whole_gradients(ranks, step, strategy)
        assert differing(gradients, flat(expected)) == [], f"in step {step}"
    for rank, state in zip(ranks, plain.states, strict=True):
        assert differing(rank.state, state) == []


def assert_close(ranks: Sequence[Sharded], plain: Plain, tolerance: float) -> None:
    """Every rank's parameters and buffers, relative to each tensor's largest magnitude."""
    for rank in ranks:
        assert off(rank.state, plain.states[0], tolerance) == {}


def off(state: Gradients, expected: Gradients, tolerance: float) -> dict[str, float]:
    """The tensors that are further away than ``tolerance`` of their maximum, with how far."""
    assert state.keys() == expected.keys()
    far = {name: distance(state[name], expected[name]) for name in state}
    return {name: value for name, value in far.items() if not value <= tolerance}


def distance(value: Tensor | None, expected: Tensor | None) -> float:
    """The largest difference, relative to the largest magnitude expected."""
    if value is None or expected is None or expected.numel() == 0:
        return 0.0 if value is expected or value is not None else float("inf")
    difference = (value.flatten().double() - expected.flatten().double()).abs().max()
    return 0.0 if difference == 0 else float(difference / expected.double().abs().max())


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else local(value).detach().clone()
