"""The file-system calls of a save, one by one: to count them, to fail at one, or to die at it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from shardwise.checkpoint import folder

CALLS = (
    "open", "write", "pwrite", "fsync", "mkdir", "rename", "replace", "symlink", "unlink", "rmdir",
)  # fmt: skip


@contextmanager
def watched(before: Callable[[str], None]) -> Iterator[None]:
    """Inside, ``before`` is called with each call's name, on its thread, before it happens."""
    with ExitStack() as stack:
        for name in CALLS:
            stack.enter_context(
                mock.patch.object(os, name, _watched_call(getattr(os, name), before))
            )
        real = folder._exchange  # noqa: SLF001 - the one call that is not of ``os``
        exchange = _watched_call(real, before, "exchange")
        stack.enter_context(mock.patch.object(folder, "_exchange", exchange))
        yield


def _watched_call(real: Callable[..., Any], before: Callable[[str], None], name: str = "") -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        before(name or real.__name__)
        return real(*args, **kwargs)

    return call
