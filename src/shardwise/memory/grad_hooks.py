"""Hooks on the gradients of parameters, and whether ``torch.autograd.grad`` asked for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from shardwise.plan.spec import SMALL_GRADIENT
from shardwise.torch_internals import (
    after_accumulation,
    disable_torch_function,
    engine_executes,
    get_grad,
    set_after_accumulation,
    set_grad,
)

Hook = Callable[[Tensor], None]


class Arrivals(list[Tensor]):
    """A hook on the gradients of a bucket's ``small`` parameters: each is told at once, or held."""

    tell: Hook
    due = -1  # how many are held before the last one, which is told

    def __init__(self, params: Sequence[nn.Parameter], numels: Sequence[int]) -> None:
        super().__init__()
        self.small = [index for index, numel in enumerate(numels) if numel < SMALL_GRADIENT]
        self._numbers = {id(param): index for index, param in enumerate(params)}

    def __call__(self, param: Tensor) -> None:
        self.tell(param)

    def hold(self, held: bool, due: int = -1) -> None:
        """Tell of none, or of one after ``due`` others, but keep them: a third of the time each."""
        self.due = due
        self.__class__ = Arrivals if not held else _Held if due < 0 else _HeldUntilLast

    def take(self, params: Sequence[nn.Parameter]) -> tuple[Sequence[int], list[Any]]:
        """Take the gradients of those that are held: their numbers, and what was in ``.grad``."""
        indices = self.small
        if len(self) != len(indices):  # else, if one came twice, another one has None
            indices = [*dict.fromkeys(map(self._numbers.__getitem__, map(id, self)))]
        self.clear()
        held = [*map(params.__getitem__, indices)]  # not kept: a hook that holds them is a cycle
        with disable_torch_function():
            grads = [*map(get_grad, held)]
            [*map(set_grad, held, repeat(None))]
        return indices, grads


class _Held(Arrivals):
    __call__: Any = list.append  # which is no call of Python


class _HeldUntilLast(Arrivals):
    def __call__(self, param: Tensor) -> None:
        self.append(param) if len(self) < self.due else self.tell(param)


class _Hooks(OrderedDict[int, Hook]):
    """The hooks on a parameter's gradient, of which autograd calls ours alone.

    What arrives is this rank's gradient, whole, and ours removes it. Those of users want the mean,
    as the shard has it, so they are kept here until that is there. While ours is not installed,
    autograd calls them all: it reads the underlying dict.
    """

    def __init__(self) -> None:
        super().__init__()
        self.users = dict[int, Hook]()
        self._ours: int | None = None

    def install(self, key: int, hook: Hook) -> None:
        self.users.update(self)
        self.clear()
        self._ours = key
        super().__setitem__(key, hook)

    def __setitem__(self, key: int, hook: Hook) -> None:
        self.users[key] = hook
        if self._ours is None:
            super().__setitem__(key, self.users.pop(key))

    def __contains__(self, key: object) -> bool:
        return key in self.users or super().__contains__(key)

    def __delitem__(self, key: int) -> None:
        if self.users.pop(key, None) is None:
            super().__delitem__(key)
        if key == self._ours:
            self._ours = None
            while self.users:
                first = next(iter(self.users))
                super().__setitem__(first, self.users.pop(first))


def on_gradient(param: nn.Parameter, hook: Hook) -> tuple[RemovableHandle, Mapping[int, Hook]]:
    """Call ``hook`` after each gradient; ``param`` may be frozen.

    Returns:
        Its handle, and the hooks of users, which are not called while it is there.
    """
    with disable_torch_function():
        hooks = after_accumulation(param)
        if not isinstance(hooks, _Hooks):
            others, hooks = hooks, _Hooks()
            if others:  # their handles refer to the old dict
                hooks[_BEFORE] = partial(_call, others)
            set_after_accumulation(param, hooks)
    handle = RemovableHandle(hooks)
    hooks.install(handle.id, hook)
    return handle, hooks.users


_BEFORE = -1
"""The key of the hooks that were there before; torch's handles count from 0."""


def _call(hooks: Mapping[int, Callable[[Tensor], None]], param: Tensor) -> None:
    for hook in tuple(hooks.values()):
        hook(param)


def is_handed_out(param: nn.Parameter) -> bool | None:
    """Does the running backward pass return this gradient (``True``) or accumulate it (``False``)?

    ``None``: neither. torch.autograd.grad returns gradients and accumulates none.
    """
    try:
        with disable_torch_function():
            executes = engine_executes(get_gradient_edge(param).node)
    except RuntimeError:  # torch raises if the leaf is neither executed nor skipped
        return True
    return False if executes else None
