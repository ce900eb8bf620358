"""An optimizer's state, cut to one rank's shards and made whole again.

An optimizer that is older than ``shard()``, or loads what a plain one saved, has state of whole
parameters. State with one value for each element is cut like the parameter; numbers stay.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from shardwise.errors import OptimizerError
from shardwise.memory.parameters import Bucket
from shardwise.memory.shard_tensor import ShardTensor
from shardwise.memory.sharding import sharding_of
from shardwise.optim.blockwise import SCALES, blocks, cut_scales, whole_of_parts

# 0-dim state that counts or schedules steps, and is no element's value.
BOOKKEEPING = frozenset({"step", "eta", "mu", "mu_product"})


def is_scalar(name: str, value: Tensor, shape: torch.Size) -> bool:
    """Is the state one number for a whole parameter of this shape, not one for each element?"""
    return value.ndim == 0 and (name in BOOKKEEPING or len(shape) > 0)


def cut_state(optimizer: Optimizer, param: nn.Parameter, is_elementwise: bool) -> None:
    """Cut a parameter's state to plain tensors of the shape of this rank's shard.

    Raises:
        OptimizerError: an optimizer that ``is_elementwise`` has tensors of another shape.
    """
    sharding, state = sharding_of(param), optimizer.state.get(param)
    if not state:
        return
    for name, value in state.items():
        if isinstance(value, ShardTensor):  # made before the first step, like the parameter
            state[name] = value.to_local()
        elif sharding is None or sharding.shape == param.shape or not isinstance(value, Tensor):
            continue
        elif name in SCALES and value.numel() == blocks(sharding.shape.numel()):
            state[name] = cut_scales(value, sharding)
        elif _is_elements(name, value, sharding.shape):
            state[name] = sharding.cut(value, param.shape).clone()
        elif is_elementwise and name not in BOOKKEEPING and value.shape != param.shape:
            raise OptimizerError(
                f"state {name!r} of parameter {sharding.name!r} has shape {tuple(value.shape)}; "
                f"the shard here is {tuple(param.shape)} of {tuple(sharding.shape)}. It is another "
                "rank's state, or that of other ranks. Load whole state, as an unsharded optimizer "
                "has it, or use sharded.load_optimizer_state_dict() or sharded.load()."
            )


def uncut_state(optimizer: Optimizer, bucket: Bucket) -> None:
    """Make the state of a bucket's parameters whole. A collective."""
    states = [optimizer.state.get(param, {}) for param in bucket.params]
    cut = [
        {
            name: value
            for name, value in state.items()
            if name in SCALES or _is_elements(name, value, param.shape)
        }
        for state, param in zip(states, bucket.params, strict=True)
    ]
    # 8-bit optimizers keep the state of small parameters in another dtype.
    kinds = {(name, value.dtype) for of_param in cut for name, value in of_param.items()}
    for name, dtype in sorted(kinds, key=str):
        values = [of_param.get(name) for of_param in cut]
        parts = [part if part is not None and part.dtype is dtype else None for part in values]
        wholes = whole_of_parts(bucket, name, parts, dtype)
        for state, part, whole in zip(states, parts, wholes, strict=True):
            if part is not None:
                state[name] = whole.clone()


def _is_elements(name: str, value: object, shape: torch.Size) -> bool:
    """Has this state one value for each element of a parameter of this shape?"""
    is_tensor = isinstance(value, Tensor) and value.shape == shape
    return is_tensor and (len(shape) > 0 or name not in BOOKKEEPING)
