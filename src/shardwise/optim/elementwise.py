"""Optimizers that may step on shards: those that update each element by itself.

An elementwise update (Adam, SGD) is the same on a shard as on the whole parameter. One that
looks across elements (a factored moment, an orthogonalised matrix, a line search) silently
computes something else on a shard.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from shardwise.errors import OptimizerError
from shardwise.memory.shard_tensor.adapter_order import check_optimizer
from shardwise.memory.sharding import Sharding, sharding_of
from shardwise.optim.blockwise import ADAMW, check_blocks, is_blockwise

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
_REASONS = {
    "LBFGS": "its line search needs inner products over whole parameters, on every rank alike",
    "Adafactor": "its factored second moment averages over whole rows and columns",
    "Muon": "it orthogonalises whole matrices",
}
_INSTEAD = {"Muon": "sw.optim.Muon(sharded), which is exact on shards"}


def check_elementwise(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    """Raises ``OptimizerError`` where its step on shards, or its state dict, would be wrong."""
    check_optimizer(type(optimizer).__name__, params)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise OptimizerError(
            "SparseAdam cannot step on a sharded model: it needs sparse gradients, and those that "
            "are averaged over the ranks are dense. Use torch.optim.AdamW for these parameters."
        )
    if is_blockwise(optimizer):
        check_blocks(optimizer, params)
        return
    split = [s for p in params if (s := sharding_of(p)) and s.placement == "fully_sharded"]
    own, torchs = (_unwrapped(kind, "state_dict") for kind in (type(optimizer), Optimizer))
    stores_all = own is torchs or "super" in own.__code__.co_names  # by ``_make_whole``
    if split and not (stores_all and is_elementwise(type(optimizer))):
        raise OptimizerError(_not_elementwise(type(optimizer), split, len(params)))


def _not_elementwise(kind: type[Optimizer], split: Sequence[Sharding], held: int) -> str:
    """Say why it cannot step on the parameters in ``split``, of the ``held`` ones."""
    example, name = split[0], kind.__name__
    if name in _REASONS:
        advice = f"{_REASONS[name]}, so on shards it would be silently wrong"
    elif is_elementwise(kind):
        advice = "its state_dict() calls no torch's, and would give one rank's part as the whole"
    else:
        advice = "it is not known to update each element by itself"
        base = next((base for base in kind.__mro__ if base in ELEMENTWISE), kind)
        for own in own_steps(kind, base)[:1]:
            advice += f", since it has a {own}() of its own and not that of {base.__name__}"
        vouched = f"`{name}.elementwise = True`"
        advice += f". If it does, and takes no norm or sum of a parameter: {vouched}"
    instead = _INSTEAD.get(name, "an elementwise optimizer such as torch.optim.AdamW")
    return (
        f"{name} cannot step on shards ({len(split)} of {held} parameters are "
        f"sharded; {example.name!r} is held here as {example.stop - example.start:,} of "
        f'{example.shape.numel():,} elements): {advice}. Use {instead}, or strategy="no_shard".'
    )


def is_elementwise(kind: type[Optimizer]) -> bool:
    """Is the ``step`` of this class known to update each element by itself, or vouched for?

    A subclass that has a ``step`` of its own is not known, whatever it inherits: LARS is an SGD.
    Nor is one with its own helper of that ``step``, such as torch's ``_init_group``.
    """
    for base in (base for base in kind.__mro__ if issubclass(base, Optimizer)):
        if base in ELEMENTWISE or base.__module__ == ADAMW or "elementwise" in vars(base):
            return not own_steps(kind, base) and bool(vars(base).get("elementwise", True))
    return False


def own_steps(kind: type[Optimizer], base: type[Optimizer]) -> list[str]:
    """The methods of a step that ``kind`` has of its own, and not from ``base``."""
    private = (name for name in dir(base) if name[:1] == "_" != name[1:2])
    names = ["step", *(name for name in private if inspect.isfunction(getattr(base, name)))]
    # torch wraps the ``step`` of each class when the first instance is made.
    return [n for n in names if _unwrapped(kind, n) is not _unwrapped(base, n)]


def _unwrapped(kind: type[Optimizer], name: str) -> Any:
    return inspect.unwrap(getattr(kind, name))
