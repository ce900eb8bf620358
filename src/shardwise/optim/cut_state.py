"""An optimizer's state, cut to one rank's shards and made whole again.

An optimizer that is older than ``shard()``, or loads what a plain one saved, has state of whole
parameters. State with one value for each element is cut like the parameter; numbers stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from shardwise.config.options import blocks
from shardwise.memory.parameters import Bucket
from shardwise.memory.shard_tensor.shard_tensor import ShardTensor
from shardwise.memory.sharding import Sharding, sharding_of
from shardwise.optim.blockwise import SCALES, whole_of_parts, without_tables
from shardwise.torch_internals import tree_leaves, tree_map, tree_map_only

# 0-dim state that counts or schedules steps, and is no element's value.
BOOKKEEPING = frozenset({"step", "eta", "mu", "mu_product"})
OF_RANK = " Its shape is "  # what follows in a message differs by rank


def is_scalar(name: str, value: Tensor, shape: torch.Size) -> bool:
    """Is the state one number for a whole parameter of this shape, not one for each element?"""
    return value.ndim == 0 and (name in BOOKKEEPING or len(shape) > 0)


def cut_state(optimizer: Optimizer, param: nn.Parameter, is_known: bool) -> str:
    """Cut a parameter's state to plain tensors of the shape, device and memory format of its shard.

    Tensors in lists, tuples and dicts are state, too. A fused kernel goes through the memory of
    state and parameter side by side, so their formats must be one.

    Returns:
        Which tensor has not the shard's shape; if not ``is_known``, one of several split elements.
    """
    sharding, state = sharding_of(param), optimizer.state.get(param)
    if sharding is None or not state:
        return ""
    for name, value in without_tables(state).items():
        if isinstance(value, Tensor) and name in SCALES:
            if value.numel() == blocks(sharding.shape.numel()):
                start, stop = blocks(sharding.start), blocks(sharding.stop)
                state[name] = value[start:stop].clone()  # none of an empty part
            continue
        cut = partial(_cut, name, param=param, sharding=sharding)
        state[name] = new = tree_map_only(Tensor, cut, value)
        leaves = [] if name in BOOKKEEPING else tree_leaves(new)
        for leaf in (x for x in leaves if isinstance(x, Tensor) and x.shape != param.shape):
            if is_known or (leaf.numel() != 1 and sharding.placement == "fully_sharded"):
                return _misfit(name, leaf, param, sharding)
    return ""


def _cut(name: str, value: Tensor, param: nn.Parameter, sharding: Sharding) -> Tensor:
    if isinstance(value, ShardTensor):  # made before the first step, like the parameter
        value = value.to_local()
    elif _is_elements(name, value, sharding.shape) and value.shape != param.shape:
        value = sharding.cut(value, param.shape).clone()
    is_elements = _is_elements(name, value, param.shape)
    return value.to(param.device).contiguous() if is_elements else value


def _misfit(name: str, value: Tensor, param: nn.Parameter, sharding: Sharding) -> str:
    return (
        f"state {name!r} of parameter {sharding.name!r} is of other ranks, or has no value for "
        "each element and cannot be cut. Load full state, as optimizer.state_dict() gives it, or "
        f"use sharded.load().{OF_RANK}{tuple(value.shape)}; the shard here is "
        f"{tuple(param.shape)} of {tuple(sharding.shape)}."
    )


def whole_state(
    optimizer: Optimizer, bucket: Bucket, copy: Callable[[Tensor], Tensor]
) -> list[dict[str, Any]]:
    """The state of a bucket's parameters, by a ``copy`` of each whole tensor. A collective."""
    states = [optimizer.state.get(param, {}) for param in bucket.params]
    cut = [_elements(*pair) for pair in zip(states, bucket.params, strict=True)]
    wholes: list[dict[Key, Tensor]] = [{} for _ in cut]
    for index, key, whole in each_whole(bucket, cut):
        wholes[index][key] = copy(whole)
    return [_replaced(*pair) for pair in zip(states, wholes, strict=True)]


#: The name of a state, and the number of a tensor in it: 0, but for state that is a list.
Key = tuple[str, int]


def each_whole(
    bucket: Bucket, states: Sequence[Mapping[Key, Tensor]]
) -> Iterator[tuple[int, Key, Tensor]]:
    """Each tensor of the state of a bucket's parameters, whole, and whose it is. Collectives."""
    # 8-bit optimizers keep the state of small parameters in another dtype.
    kinds = {(key, value.dtype) for state in states for key, value in state.items()}
    for key, dtype in sorted(kinds, key=str):
        values = [state.get(key) for state in states]
        parts = [part if part is not None and part.dtype is dtype else None for part in values]
        for index, whole in enumerate(whole_of_parts(bucket, key[0], parts, dtype)):
            if parts[index] is not None:
                yield index, key, whole


def _elements(state: Mapping[str, Any], param: nn.Parameter) -> dict[Key, Tensor]:
    """The tensors that have one value for each element of the shard."""
    return {
        (name, number): leaf
        for name, value in state.items()
        for number, leaf in enumerate(tree_leaves(value))
        if name in SCALES or _is_elements(name, leaf, param.shape)
    }


def _replaced(state: Mapping[str, Any], wholes: Mapping[Key, Tensor]) -> dict[str, Any]:
    """The state with other tensors in place of some."""

    def replaced(name: str, value: Any) -> Any:
        numbers = count()
        return tree_map(lambda leaf: wholes.get((name, next(numbers)), leaf), value)

    return {name: replaced(name, value) for name, value in state.items()}


def _is_elements(name: str, value: object, shape: torch.Size) -> bool:
    """Has this state one value for each element of a parameter of this shape?"""
    is_tensor = isinstance(value, Tensor) and value.shape == shape
    return is_tensor and (len(shape) > 0 or name not in BOOKKEEPING)
