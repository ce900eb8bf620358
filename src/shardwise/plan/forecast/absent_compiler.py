"""A module in place of torch's compiler, whose import takes longer than an observation.

Kernels of the meta device that are written in Python import ``torch._dynamo`` when they are first
called, to stay out of graphs: one to two seconds of each start. While a model is observed nobody
makes graphs, so the module leaves such functions as they are. Who asks it for anything else gets
the compiler.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
KEPT_OUT = "__dynamo_disable"
"""The attribute in which torch keeps what ``disable`` has made of a function."""


class AbsentCompiler(ModuleType):
    """A compiler that compiles nothing, so no function has to be kept out of its graphs."""

    def __init__(self) -> None:
        super().__init__(COMPILER)
        self.unchanged: list[Callable[..., Any]] = []

    def disable(self, function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        """Return ``function`` as it is."""
        self.unchanged.append(function)
        return function

    def __getattr__(self, name: str) -> Any:
        self.leave()
        return getattr(import_module(COMPILER), name)

    def leave(self) -> None:
        """Give way to the compiler, and keep what it must not see from it."""
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER]
        while self.unchanged:
            vars(self.unchanged.pop()).pop(KEPT_OUT, None)


@contextmanager
def without_compiler() -> Iterator[None]:
    """No kernel imports the compiler, unless it is there already."""
    if COMPILER in sys.modules:
        yield
        return
    absent = sys.modules[COMPILER] = AbsentCompiler()
    try:
        yield
    finally:
        absent.leave()
