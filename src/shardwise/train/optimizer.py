"""The optimizer of a recipe: ``sw.optim.AdamW``, or AdamW of bitsandbytes in 8 bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shardwise.api.sharded import Sharded
from shardwise.config.options import BLOCK
from shardwise.errors import ConfigError
from shardwise.optim.fused import AdamW
from shardwise.plan.forecast.memory import AVERAGED, MOMENTUM, START
from shardwise.recipe.recipe import OptimizerConfig, Recipe


def parameter_groups(
    parameters: Iterable[nn.Parameter], weight_decay: float
) -> list[dict[str, Any]]:
    """Two parameter groups: matrices with weight decay, and norms without.

    Decaying a norm's scale would shrink its output, not regularise it. A shard has the number of
    dimensions of its parameter, so the rule holds for shards.
    """
    trained = [param for param in parameters if param.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def blocksize_of(optimizer: str) -> int:
    """Return ``sw.shard``'s block size, by an optimizer's name: elements per scale; 0 = none."""
    return BLOCK if "8bit" in optimizer else 0


def state_of(recipe: Recipe) -> str:
    """Name the optimizer with all that its state will hold, as ``plan.forecast.memory`` does."""
    outer = recipe.outer.method != "none"
    parts = {
        AVERAGED: recipe.optimizer.ema is not None,
        START: outer,
        MOMENTUM: outer and recipe.outer.outer_momentum > 0,
    }
    name = recipe.optimizer.name.removeprefix("paged_")
    return name + "".join(part for part, is_kept in parts.items() if is_kept)


def optimizer_of(sharded: Sharded, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Make the optimizer of the parameters that are trained.

    Raises:
        ConfigError: it is bitsandbytes', which is not installed.
    """
    groups = parameter_groups(sharded.model.parameters(), config.weight_decay)
    options: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.name == "adamw":
        return AdamW(sharded, groups, **options)
    try:
        from bitsandbytes import optim
    except ImportError as error:
        raise ConfigError(
            f"optimizer.name is {config.name}, of bitsandbytes, which is not there ({error}). Run "
            "pip install shardwise[bnb], or write optimizer.name: adamw."
        ) from error
    on_cpu = all(p.device.type == "cpu" for group in groups for p in group["params"])
    pages = config.name == "paged_adamw_8bit" and not on_cpu  # there it would warn in each step
    kind = optim.PagedAdamW8bit if pages else optim.AdamW8bit
    of_8_bits: torch.optim.Optimizer = kind(groups, **options)
    return of_8_bits
