"""Training without shards: what every sharded run is compared with.

``one_by_one`` is what W ranks should do, done by one process that plays them in turn: each rank's
micro-batches run on the same whole model, and the ranks' gradients are added in rank order. The
operations are those of the sharded run, in its order, so the result must be equal bit for bit.

``large_batch`` is what data parallelism stands for: all ranks' rows in one batch. Sums are formed
in another order there, so the result is equal up to rounding only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.nets import Net, loss

Gradients = Mapping[str, Tensor | None]
"""By the parameter's first name."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

SGD: MakeOptimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW: MakeOptimizer = partial(torch.optim.AdamW, lr=0.01)
OPTIMIZERS = {"sgd": SGD, "adamw": ADAMW}


@dataclass(frozen=True)
class Recipe:
    """A training run, but for who carries it out.

    Attributes:
        build: a whole model; the same for the same ``torch.manual_seed``.
        batch: a micro-batch from a seed and a number of rows.
        optimizer: from parameters.
        loss: a 0-dim tensor from a model and a micro-batch.
        steps, micro, rows: optimizer steps; micro-batches per rank and step; rows of each.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    optimizer: MakeOptimizer
    loss: Callable[[nn.Module, Any], Tensor] = loss
    steps: int = 4
    micro: int = 1
    rows: int = 2

    @classmethod
    def of(cls, net: Net, optimizer: MakeOptimizer, **changes: Any) -> Recipe:
        return cls(net.build, net.batch, optimizer, **changes)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def batches(self, step: int, rank: int) -> list[Any]:
        """The micro-batches of one rank in one step; no two are alike in the whole run."""
        first = 10_000 * (step + 1) + 100 * rank
        return [self.batch(first + 10 * part, self.rows) for part in range(self.micro)]


@dataclass(frozen=True)
class Plain:
    """What a plain run saw.

    Attributes:
        losses: of each micro-batch, in the order in which each rank saw its own; ``[rank]``.
        gradients: of each step, before the optimizer's.
        states: ``state_dict()`` after the last step; ``[rank]``, for buffers differ.
    """

    losses: list[list[float]]
    gradients: list[Gradients]
    states: list[dict[str, Tensor]]


def one_by_one(recipe: Recipe, world: int, model: nn.Module | None = None) -> Plain:
    """One process that plays ``world`` ranks in turn. ``model``: instead of a new one."""
    model = recipe.model() if model is None else model
    optimizer = recipe.optimizer(model.parameters())
    losses: list[list[float]] = [[] for _ in range(world)]
    buffers = [_buffers(model) for _ in range(world)]
    gradients: list[Gradients] = []
    for step in range(recipe.steps):
        parts = []
        for rank in range(world):
            _put_buffers(model, buffers[rank])
            for batch in recipe.batches(step, rank):
                value = recipe.loss(model, batch)
                (value / recipe.micro).backward()
                losses[rank].append(value.item())
            buffers[rank] = _buffers(model)
            parts.append(_taken(model))
        gradients.append(mean_in_rank_order(parts))
        put_gradients(model, gradients[-1])
        optimizer.step()
        optimizer.zero_grad()
    return Plain(losses, gradients, [_state(model, mine) for mine in buffers])


def large_batch(recipe: Recipe, world: int, model: nn.Module | None = None) -> Plain:
    """All ranks' rows in one batch; ``losses`` and ``states`` have one entry, not ``world``."""
    model = recipe.model() if model is None else model
    optimizer = recipe.optimizer(model.parameters())
    losses, gradients = list[float](), list[Gradients]()
    for step in range(recipe.steps):
        parts = [batch for rank in range(world) for batch in recipe.batches(step, rank)]
        value = recipe.loss(
            model, tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
        )
        value.backward()
        losses.append(value.item())
        gradients.append({n: _copy(p.grad) for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return Plain([losses], gradients, [_state(model, {})])


def mean_in_rank_order(parts: Sequence[Gradients]) -> Gradients:
    """``((g0 + g1) + g2 …) / W``; ``None`` where no rank has a gradient, else zero for ``None``."""
    return {name: _mean([part[name] for part in parts]) for name in parts[0]}


def _mean(parts: Sequence[Tensor | None]) -> Tensor | None:
    some = next((part for part in parts if part is not None), None)
    if some is None:
        return None
    first, *rest = (torch.zeros_like(some) if part is None else part for part in parts)
    for part in rest:
        first = first + part
    return first / len(parts)


def put_gradients(model: nn.Module, gradients: Gradients) -> None:
    """Copies: clipping and some optimizers write to ``.grad``."""
    for name, param in model.named_parameters():
        param.grad = _copy(gradients[name])


def _taken(model: nn.Module) -> Gradients:
    gradients = {name: param.grad for name, param in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return gradients


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.clone()


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _put_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def _state(model: nn.Module, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return state | {name: value for name, value in buffers.items() if name in state}
