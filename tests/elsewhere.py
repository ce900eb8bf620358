"""Backward passes in a thread of their own, as autograd has them on every device but the CPU.

Each thread that calls ``backward()`` has one other thread for it, which numbers its own nodes. A
backward pass inside another one, as in a reentrant checkpoint, stays in that thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.autograd.graph import get_gradient_edge

__all__ = ["backward_elsewhere", "nodes_ahead"]

SECONDS = 60.0
_backward = torch.autograd.backward


class _Threads(threading.local):
    def __init__(self) -> None:
        self.computes = False  # is it one of those that compute backward passes?
        self.pool = ThreadPoolExecutor(1, "backward")


@contextmanager
def backward_elsewhere(
    modes: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[None]:
    """Inside, ``backward()`` of any thread computes in another one, the same each time.

    Args:
        modes: in which it computes there.
    """
    threads = _Threads()

    def compute(*args: Any, **kwargs: Any) -> None:
        threads.computes = True
        with modes():
            _backward(*args, **kwargs)

    def backward(*args: Any, **kwargs: Any) -> None:
        if threads.computes:
            _backward(*args, **kwargs)
        else:
            threads.pool.submit(compute, *args, **kwargs).result(SECONDS)

    with mock.patch.object(torch.autograd, "backward", backward):
        yield


def nodes_ahead(count: int) -> None:
    """Make nodes in this thread, so that later ones have higher numbers."""
    x = torch.ones(1, requires_grad=True)
    for _ in range(count):
        get_gradient_edge(x * 1)
