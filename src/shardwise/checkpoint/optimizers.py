"""Optimizer state by parameter name, whatever the groups, the ranks and the optimizer's order.

torch numbers parameters by their place in the groups, so its saved state fits one script and one
model. Here each element-wise state is a tensor of the whole parameter's shape, ``exp_avg/NAME``,
stored by ranges like the parameter; what is one number for the parameter (``step``) is a
0-dim tensor; and a group's options are kept with the names of its parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.checkpoint import plain
from shardwise.checkpoint.holdings import Holding, Home, whole_of_rank_0
from shardwise.errors import CheckpointError
from shardwise.optim.gate import BOOKKEEPING
from shardwise.shard_tensor import ShardTensor

__all__ = [
    "AS_BUILT",
    "Given",
    "Named",
    "Optimizers",
    "as_optimizers",
    "check_key",
    "contents",
    "is_scalar",
    "params_of",
    "part_of",
    "states_of",
]

Optimizers = Sequence[Optimizer]
Given = Optimizer | Iterable[Optimizer] | None

AS_BUILT = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Options that say of what or how to compute, not what: they stay as the optimizer was made."""


def as_optimizers(given: Given) -> tuple[Optimizer, ...]:
    """One, several or none, as a tuple."""
    if given is None:
        return ()
    found = (given,) if isinstance(given, Optimizer) else tuple(given)
    for one in found:
        if not isinstance(one, Optimizer):
            raise CheckpointError(
                f"optimizer is a {type(one).__qualname__}, and not a torch.optim.Optimizer. Pass "
                "the optimizer, or several of them in a list."
            )
    return found


class Named:
    """The parameters of a model, found by the objects that optimizers hold."""

    def __init__(self, places: Sequence[Home]) -> None:
        self.places = places
        self._by_id = {id(home.member.param): home for home in places}

    def home(self, param: Tensor, optimizer: Optimizer) -> Home:
        """Where the parameter is, and what it is called.

        Raises:
            CheckpointError: it is none of this model's.
        """
        if id(param) not in self._by_id:
            raise CheckpointError(
                f"{type(optimizer).__qualname__} holds a parameter of shape {tuple(param.shape)} "
                "that is none of this sharded model's, so it has no name to be stored by. Pass the "
                "optimizer of this model's parameters."
            )
        return self._by_id[id(param)]


def contents(optimizers: Optimizers, named: Named) -> tuple[list[Holding], list[Any]]:
    """The tensors to store, and the rest as JSON, one record for each optimizer."""
    elements: dict[str, dict[str, Tensor]] = {}  # state name → parameter → this rank's part
    scalars: list[Holding] = []
    records = []
    for optimizer in optimizers:
        values: dict[str, dict[str, Any]] = {}
        for home, key, value in states_of(optimizer, named):
            name = home.member.name
            if not isinstance(value, Tensor):
                where = f"optimizer state {key!r} of {name!r}"
                values.setdefault(name, {})[key] = plain.encode(value, where)
            elif is_scalar(key, value, home.member.shape):
                scalars.append(whole_of_rank_0(f"{key}/{name}", value))
            else:
                elements.setdefault(key, {})[name] = part_of(key, value, home)
        groups = [_group(group, optimizer, named) for group in optimizer.param_groups]
        records.append({"class": type(optimizer).__qualname__, "groups": groups, "values": values})
    found = [
        home.holding(f"{key}/{home.member.name}", parts[home.member.name])
        for key, parts in sorted(elements.items())
        for home in named.places
        if home.member.name in parts
    ]
    return found + sorted(scalars, key=lambda scalar: scalar.entry.name), records


def states_of(optimizer: Optimizer, named: Named) -> Iterator[tuple[Home, str, Any]]:
    """Each state of each parameter: whose, its key, and the value on this rank."""
    for param in params_of(optimizer):
        home = named.home(param, optimizer)
        for key, value in optimizer.state.get(param, {}).items():
            check_key(key, home.member.name)
            yield home, key, value.to_local() if isinstance(value, ShardTensor) else value


def is_scalar(key: str, value: Tensor, shape: torch.Size) -> bool:
    """Is it one number for the whole parameter of this shape, and not one for each element?"""
    return value.ndim == 0 and (key in BOOKKEEPING or len(shape) > 0)


def part_of(key: str, value: Tensor, home: Home) -> Tensor:
    """The elements of this state that belong to the rank's part of the parameter.

    Raises:
        CheckpointError: it has not one value for each element.
    """
    if value.shape == home.value.shape:
        return value
    if len(home.member.shape) == 0 and value.ndim == 0:  # of a 0-dim parameter that others hold
        return value.reshape(-1)[:0]
    raise CheckpointError(
        f"optimizer state {key!r} of {home.member.name!r} has shape {tuple(value.shape)}; the "
        f"parameter's shard has {tuple(home.value.shape)} (of {tuple(home.member.shape)}). Only "
        "state with one value for each element, or one for the parameter, can be cut anew for "
        "another number of ranks. Use an elementwise optimizer, or leave the optimizer out."
    )


def _group(group: dict[str, Any], optimizer: Optimizer, named: Named) -> dict[str, Any]:
    kind = type(optimizer).__qualname__
    return {
        "params": [named.home(param, optimizer).member.name for param in group["params"]],
        "options": {
            key: plain.encode(value, f"option {key!r} of {kind}")
            for key, value in group.items()
            if key not in AS_BUILT
        },
    }


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Every parameter that the optimizer holds, group by group."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def check_key(key: object, name: str) -> None:
    """Raises ``CheckpointError`` if no tensor can be stored under this key."""
    if not isinstance(key, str) or not key or "/" in key:
        raise CheckpointError(
            f"the optimizer keeps state under the key {key!r} for {name!r}; only texts without "
            "'/' can be stored."
        )
