"""What torch.compile must not see of a sharded model: our functions, and shards' gradients.

A unit is gathered and freed by hooks, in Python, with collectives: nothing that a graph could
hold. Where torch.compile meets such a function it ends the graph, lets the function run, and
begins a new graph behind it. The ordinary way to ask for that, ``torch.compiler.disable``,
imports the compiler for everybody and costs a microsecond a call; the marks that it sets cost
nothing.

While a unit is gathered its parameters are whole, and their ``.grad`` still has the shape of a
shard. The compiler refuses that, so gradients step aside for as long as it compiles.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any, Protocol
from weakref import WeakSet

from torch import Tensor, nn

from shardwise.guard import put_grad
from shardwise.torch_internals import (
    disable_torch_function,
    get_grad,
    set_grad,
    skip_in_dynamo,
    watch_compiler,
)

__all__ = ["shield"]


class Shielded(Protocol):
    """A sharded model."""

    def whole_trainable(self) -> Iterable[nn.Parameter]:
        """The trainable parameters that are whole now."""


class _Thread(threading.local):
    """Of one thread: a rank may be one."""

    def __init__(self) -> None:
        self.models: WeakSet[Shielded] = WeakSet()
        self.aside: list[tuple[nn.Parameter, Tensor]] = []


_thread = _Thread()


def shield(model: Shielded) -> None:
    """Before a forward pass of ``model``: what is compiled in it finds no gradient of a shard."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return
    _thread.models.add(model)
    watch_compiler(dynamo, _set_aside, _put_back)


def _set_aside(_: Any) -> None:
    params = (param for model in _thread.models for param in model.whole_trainable())
    with disable_torch_function():
        for param in params:
            if (grad := get_grad(param)) is not None:
                _thread.aside.append((param, grad))
                set_grad(param, None)


def _put_back(_: Any) -> None:
    with disable_torch_function():
        while _thread.aside:
            put_grad(*_thread.aside.pop())


skip_in_dynamo(_set_aside, _put_back)
