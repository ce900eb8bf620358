"""A model that is trained, as every engine of every benchmark offers it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from shardwise.comm.protocol import Counters
from shardwise.plan.units.units import choose_units
from shardwise.recipe.model_config import ModelConfig

Batch = tuple[Tensor, ...]
"""Inputs and targets, or inputs alone."""
Loss = Callable[[nn.Module, Batch], Tensor]
"""Of a model, or of what an engine made of it, on a batch; 0-dim."""


@dataclass(frozen=True)
class Engine:
    """A model that is ready to train."""

    compute: Callable[[Batch], Tensor]  # forward and backward; the detached loss, 0-dim
    update: Callable[[], None]  # the optimizer's step, and no gradients afterwards
    counters: Counters | None = None  # of bytes that the engine has sent; ``None`` for rivals


def training(
    model: nn.Module, loss: Loss, optimizer: Optimizer | None, counters: Counters | None = None
) -> Engine:
    """The engine of plain PyTorch code. Without an optimizer gradients are only dropped."""

    def compute(batch: Batch) -> Tensor:
        value = loss(model, batch)
        value.backward()
        return value.detach()

    def update() -> None:
        if optimizer is None:
            return model.zero_grad()
        optimizer.step()
        return optimizer.zero_grad()

    return Engine(compute, update, counters)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen."""
    return [param for param in model.parameters() if param.requires_grad]


def unit_modules(model: nn.Module) -> list[tuple[nn.Module, ...]]:
    """The modules of each unit that ``sw.shard`` would choose, without the root's."""
    return [unit.modules for unit in choose_units(model) if model not in unit.modules]


def apply_fsdp2(model: nn.Module, reshard: bool, **options: Any) -> None:
    """``fully_shard`` with the units of ``sw.shard``.

    The last unit stays gathered between forward and backward, as in torchtitan.
    """
    from torch.distributed.fsdp import fully_shard

    units = unit_modules(model)
    for modules in units:
        frees = reshard and modules is not units[-1]
        fully_shard(list(modules), reshard_after_forward=frees, **options)
    fully_shard(model, reshard_after_forward=reshard, **options)


def decoder_config(width: int, layers: int) -> ModelConfig:
    """A Llama-shaped decoder with heads of 64 and a SwiGLU of about 8/3 of the width."""
    heads = max(1, width // 64)
    return ModelConfig(
        width=width, layers=layers, heads=heads, kv_heads=heads, hidden=width * 43 // 16, tied=False
    )


def token_batch(generator: torch.Generator, vocabulary: int, rows: int, tokens: int) -> Batch:
    """Random inputs and the tokens that follow them, each ``[rows, tokens]`` int64."""
    ids = torch.randint(vocabulary, (rows, tokens + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean cross-entropy of the targets, 0-dim."""
    logits: Tensor = model(batch[0])
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
