"""Which optimizers may step on shards, checked where they step.

An elementwise update (Adam, SGD) is the same on a shard as on the whole parameter. One that
looks across elements (a factored moment, an orthogonalised matrix, a line search) silently
computes something else on a shard. The user makes the optimizer, before or after ``shard()``,
so the check sits in torch's hook before ``step``; there too, state that an optimizer gathered
before sharding is cut to the shard, and parameters show their plain class to fused kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardwise.errors import OptimizerError
from shardwise.guard import ShardedParameter, sharding_of

__all__ = ["Gate"]

_ELEMENTWISE = (
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
    "SparseAdam": "it needs sparse gradients, and gradients arrive here as dense shards",
}


class Gate:
    """Watches the optimizers that step on one sharded model.

    Args:
        params: the model's parameters.
        before_step: called before each step of an optimizer that holds any of them.
    """

    def __init__(self, params: list[nn.Parameter], before_step: Callable[[], None]) -> None:
        self._mine = {id(param) for param in params}
        self._before_step = before_step
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._unguarded: list[nn.Parameter] = []
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        params = [p for p in _params(optimizer) if id(p) in self._mine]
        if not params:
            return
        self._before_step()
        if optimizer not in self._known:
            _check_elementwise(optimizer, params)
            for param in params:
                _cut_state(optimizer, param)
            self._known.add(optimizer)
        for param in params:
            if type(param) is ShardedParameter:
                param.__class__ = nn.Parameter  # type: ignore[assignment]
                self._unguarded.append(param)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for param in self._unguarded:
            param.__class__ = ShardedParameter
        self._unguarded.clear()


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _check_elementwise(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    split = [s for p in params if (s := sharding_of(p)) is not None and s.shape != p.shape]
    kind = type(optimizer)
    if not split or isinstance(optimizer, _ELEMENTWISE) or getattr(kind, "elementwise", False):
        return
    example = split[0]
    reason = _REASONS.get(kind.__name__)
    if reason is None:
        advice = (
            f"it is not known to update each element by itself. If it does, say so: "
            f"`{kind.__name__}.elementwise = True`"
        )
    else:
        advice = f"{reason}, so on shards it would be silently wrong"
    raise OptimizerError(
        f"{kind.__name__} cannot step on shards ({len(split)} of {len(params)} parameters are "
        f"split; {example.name!r} is held here as {example.stop - example.start:,} of "
        f"{example.shape.numel():,} elements): {advice}. Use an elementwise optimizer such as "
        'torch.optim.AdamW, or strategy="no_shard".'
    )


def _cut_state(optimizer: Optimizer, param: nn.Parameter) -> None:
    """State from before ``shard()`` has the whole parameter's shape: keep this rank's part."""
    sharding = sharding_of(param)
    state = optimizer.state.get(param)
    if sharding is None or not state or sharding.shape == param.shape:
        return
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == sharding.shape and value.ndim > 0:
            state[name] = sharding.cut(value, param.shape).clone()
