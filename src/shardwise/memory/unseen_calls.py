"""Calls into torch that ``__torch_function__`` does not see, made to see shards.

torch hands tensors to C++ there without asking their class: a custom ``autograd.Function`` would be
recorded with the shape of this rank's shard, a scripted function would compute with the shard, the
transforms of ``torch.func`` wrap it in a plain tensor, and ``torch.tensor`` copies it to one. So
each of these functions first looks for shards among its arguments. In a pass of the model
parameters are made whole, as for any other function (see ``shard_tensor``); otherwise the call is
refused on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from types import ClassMethodDescriptorType
from typing import Any

from shardwise.memory.function_call import Call
from shardwise.memory.shard_tensor import ShardTensor
from shardwise.memory.sharded_parameter import ShardedParameter
from shardwise.memory.torch_functions import gather_arguments
from shardwise.torch_internals import UNSEEN_CALLS, disable_torch_function, script_as

__all__ = ["intercept_calls"]

_KINDS = frozenset((ShardTensor, ShardedParameter, list, tuple))
"""Classes of arguments that are shards, or may hold some."""


@cache
def intercept_calls() -> None:
    """Once per process, when the first model is sharded."""
    for owner, name in UNSEEN_CALLS:
        original = vars(owner)[name]
        is_bound = isinstance(original, (classmethod, ClassMethodDescriptorType))
        intercepted = _intercepted(_of_any_class(original) if is_bound else original)
        script_as(intercepted, original)
        setattr(owner, name, classmethod(intercepted) if is_bound else intercepted)


def _of_any_class(method: Any) -> Callable[..., Any]:
    """A class method, in Python or, as in torch 2.15, in C, that is given the class."""

    def call(cls: type, *args: Any, **kwargs: Any) -> Any:
        return method.__get__(None, cls)(*args, **kwargs)

    return call


def _intercepted(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not (
            _KINDS.isdisjoint(map(type, args)) and _KINDS.isdisjoint(map(type, kwargs.values()))
        ):
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
