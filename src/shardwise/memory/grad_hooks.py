"""Hooks on the gradients of parameters, and whether ``torch.autograd.grad`` asked for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from shardwise.torch_internals import (
    after_accumulation,
    disable_torch_function,
    engine_executes,
    set_after_accumulation,
)

__all__ = ["is_handed_out", "on_gradient"]


class _OursLast(OrderedDict[int, Callable[[Tensor], None]]):
    """The hooks on a parameter's gradient; the one with the key ``ours`` stays the last.

    It removes the gradient, so hooks of users must run before, even if they are added later.
    autograd calls hooks in the order of the underlying dict, which ``move_to_end`` does not change.
    """

    ours = -1  # until ours is there, the key of those that were there before

    def __setitem__(self, key: int, hook: Callable[[Tensor], None]) -> None:
        super().__setitem__(key, hook)
        if self.ours in self:
            super().__setitem__(self.ours, self.pop(self.ours))


def on_gradient(param: nn.Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call ``hook`` after each gradient and after all other hooks; ``param`` may be frozen."""
    with disable_torch_function():
        hooks = after_accumulation(param)
        if not isinstance(hooks, _OursLast):
            others, hooks = hooks, _OursLast()
            if others:  # their handles refer to the old dict
                hooks[hooks.ours] = partial(_call, others)
            set_after_accumulation(param, hooks)
    handle = RemovableHandle(hooks)
    hooks.ours = handle.id
    hooks[handle.id] = hook
    return handle


def _call(hooks: Mapping[int, Callable[[Tensor], None]], param: Tensor) -> None:
    for hook in tuple(hooks.values()):
        hook(param)


def is_handed_out(param: nn.Parameter) -> bool | None:
    """Does the running backward pass return this gradient (``True``) or accumulate it (``False``)?

    ``None``: neither. torch.autograd.grad returns gradients and accumulates none.
    """
    try:
        executes = engine_executes(get_gradient_edge(param).node)
    except RuntimeError:  # torch raises if the leaf is neither executed nor skipped
        return True
    return False if executes else None
