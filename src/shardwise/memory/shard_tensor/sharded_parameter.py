"""A parameter at rest, which must not be used as if it were whole.

A rank's shard of an 8-wide norm may have one element, which broadcasts against anything: a
model that reads a parameter outside its unit would compute garbage without an error. DTensor
answers with a tensor subclass in every operation; here only a parameter *at rest* changes its
class (the object stays the same), and while its unit is gathered it is a plain ``Parameter``
again, so computing pays nothing. What is right on shards stays allowed: see ``shard_tensor``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardwise.memory.shard_tensor.shard_tensor import ShardTensor
from shardwise.memory.shard_tensor.use_errors import copied_shard
from shardwise.torch_internals import NO_TORCH_FUNCTION, get_data, get_grad, set_data, set_grad


def put_grad(param: Tensor, grad: Tensor | None) -> None:
    """``param.grad = grad``, whatever their shapes and dtypes: torch compares them only then."""
    if grad is None:
        set_grad(param, None)
        return
    value = get_data(param)
    set_data(param, grad)
    set_grad(param, grad)
    set_data(param, value)


class LocalGradient(Tensor):
    """This rank's sum of whole gradients, not averaged: what ``.grad`` is between micro-batches.

    Otherwise a plain tensor. It is in the dtype of sums, and whole also where its parameter is not.
    """

    __torch_function__: Any = NO_TORCH_FUNCTION


def is_of_shard(grad: Tensor, whole: Tensor) -> bool:
    """Is it a shard's gradient, put in place of a ``whole`` one?"""
    return isinstance(grad, ShardTensor) or grad.shape != whole.shape


class ShardedParameter(ShardTensor, nn.Parameter):
    """The class of a parameter while it holds one rank's shard."""

    # Read and set for every parameter in every step: a property of our own costs a fifth of what
    # ``__torch_function__`` does, and to be plain meanwhile half of what its context manager does.
    @property
    def grad(self) -> Tensor | None:
        """This rank's shard of the mean gradient."""
        self.__class__ = nn.Parameter  # type: ignore[assignment]
        try:
            gradient = get_grad(self)
        finally:
            self.__class__ = ShardedParameter
        if gradient.__class__ is Tensor and "sharding" in self.__dict__:  # as ``Call.mark`` does
            gradient.sharding = self.sharding  # type: ignore[attr-defined]
            gradient.__class__ = ShardTensor
        return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.__class__ = nn.Parameter  # type: ignore[assignment]
        try:
            local = None if value is None else get_grad(self)
            if value is None or type(local) is not LocalGradient or is_of_shard(value, local):
                set_grad(self, value)
            else:
                local.detach().copy_(value.detach())
        finally:
            self.__class__ = ShardedParameter

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise copied_shard(self, "deep-copying")
