"""Support for torch.compile: graph breaks at our hooks, and no gradients of shards while compiling.

Hooks gather and free units with collectives, which a graph cannot contain, so torch.compile must
break the graph there. ``torch.compiler.disable`` would import the compiler and cost a microsecond
per call; setting its marks on the functions costs nothing.

While a unit is gathered its parameters have their full shape, and their ``.grad`` the shape of a
shard. Dynamo refuses that, so gradients are removed while it compiles and restored afterwards.
"""

from __future__ import annotations

import sys
import threading
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from shardwise.memory.shard_tensor.sharded_parameter import put_grad
from shardwise.runtime.runtime import Runtime
from shardwise.torch_internals import (
    disable_torch_function,
    get_grad,
    set_grad,
    skip_in_dynamo,
    watch_compiler,
)


class _Thread(threading.local):
    """State of one thread, since a rank may be a thread."""

    def __init__(self) -> None:
        self.models: WeakSet[Runtime] = WeakSet()
        self.hidden: list[tuple[nn.Parameter, Tensor]] = []


_thread = _Thread()


def hide_gradients(model: Runtime) -> None:
    """Called before a forward pass of ``model``: hides its gradients while dynamo compiles."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return
    _thread.models.add(model)
    watch_compiler(dynamo, _hide, _restore)


def _hide(_: Any) -> None:
    params = (param for model in _thread.models for param in model.whole())
    with disable_torch_function():
        for param in params:
            if (grad := get_grad(param)) is not None:
                _thread.hidden.append((param, grad))
                set_grad(param, None)


def _restore(_: Any) -> None:
    with disable_torch_function():
        while _thread.hidden:
            put_grad(*_thread.hidden.pop())


skip_in_dynamo(_hide, _restore)
