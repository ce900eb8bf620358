"""Calls into torch that ``__torch_function__`` does not see, made to see shards.

torch hands tensors to C++ there without asking their class: a custom ``autograd.Function`` would be
recorded with the shape of this rank's shard, a scripted function would compute with the shard, the
transforms of ``torch.func`` wrap it in a plain tensor, and ``torch.tensor`` copies it to one. So
each of these functions first looks for shards among its arguments. In a pass of the model
parameters are made whole, as for any other function (see ``shard_tensor``); otherwise the call is
refused on every rank. So is a conversion of the model, also where parameters are plain.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from types import ClassMethodDescriptorType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.memory.gathered_parameter import CALLED, Uncalled
from shardwise.memory.shard_tensor.function_call import Call
from shardwise.memory.shard_tensor.shard_tensor import ShardTensor
from shardwise.memory.shard_tensor.sharded_parameter import ShardedParameter
from shardwise.memory.shard_tensor.torch_functions import gather_arguments
from shardwise.memory.shard_tensor.use_errors import converted
from shardwise.memory.sharding import sharding_of
from shardwise.torch_internals import (
    CONVERT,
    INITIALISATIONS,
    UNSEEN_CALLS,
    disable_torch_function,
    script_as,
)

_KINDS = frozenset((ShardTensor, ShardedParameter, list, tuple))
"""Classes of arguments that are shards, or may hold some."""


@cache
def intercept_calls() -> None:
    """Wrap torch's functions once per process, when the first model is sharded."""
    # The first context of a device lists the functions that it is for: these, and not our own.
    with torch.device("cpu"):
        torch.empty(0)
    for owner, name in (*UNSEEN_CALLS, *INITIALISATIONS):
        original = inspect.getattr_static(owner, name)
        is_bound = isinstance(original, (classmethod, ClassMethodDescriptorType))
        intercepted = _intercepted(_of_any_class(original) if is_bound else original)
        script_as(intercepted, original)
        setattr(owner, name, classmethod(intercepted) if is_bound else intercepted)
    setattr(nn.Module, CONVERT, _checked(getattr(nn.Module, CONVERT)))


def _checked(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse ``.to()``, ``.half()``, … of a sharded module before anything has changed."""

    @wraps(convert)
    def call(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        for param in module.parameters(recurse):
            if (sharding := sharding_of(param)) is not None:
                with disable_torch_function():
                    value = fn(torch.empty(0, dtype=param.dtype, device=param.device))
                    if (value.dtype, value.device) != (param.dtype, param.device):
                        raise converted(sharding.name, param, value)
        return convert(module, fn, recurse)

    return call


def _of_any_class(method: Any) -> Callable[..., Any]:
    """A class method, in Python or, as in torch 2.15, in C, that is given the class."""

    def call(cls: type, *args: Any, **kwargs: Any) -> Any:
        return method.__get__(None, cls)(*args, **kwargs)

    return call


def _intercepted(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not CALLED.keys().isdisjoint(kinds := {*map(type, (*args, *kwargs.values()))}):
            return Uncalled.__torch_function__(function, kinds, args, kwargs)
        if not _KINDS.isdisjoint(kinds):
            args, kwargs = _without_shards(function, args, kwargs)
        return function(*args, **kwargs)

    return call


def _without_shards(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with whole tensors in place of shards."""
    call = Call(function, args, kwargs, ShardTensor)
    if not call.shards(call.tensors()):
        return args, kwargs
    with disable_torch_function():
        return gather_arguments(call, call.unsupported())
