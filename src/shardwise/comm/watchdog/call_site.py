"""The line of the user's program that a thread is at: what it called, and where.

It is on the thread's stack, which is read when a report is written, and not before.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from pathlib import Path
from traceback import walk_stack
from types import CodeType
from typing import Any
from weakref import WeakSet

import torch

from shardwise.comm.garbage import uncollected

_PATHS = sysconfig.get_paths()
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_SHARDWISE = f"{Path(__file__).parents[2]}{os.sep}"
#: What ``activity()`` asks, while it lives.
active: WeakSet[Any] = WeakSet()
# They call the user's program, which calls torch again.
_RUNNERS = "distributed/elastic", "distributed/run.py", "multiprocessing"
_THREADS = str(Path(_SHARDWISE, "comm/transports/threads.py"))
_STARTERS = (*(str(Path(_TORCH, name)) for name in _RUNNERS), _THREADS)
_JOINT = "barrier", "all_gather", "all_reduce"  # which no rank leaves before all have come
_INSTALLED = tuple(
    f"{_PATHS[name]}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
)


def _stack(thread: int) -> list[tuple[CodeType, int]]:
    """The code and the line of each call of ``thread``, the innermost first."""
    # In Python 3.11 a collection beside ``sys._current_frames()`` stops the process for good
    # (https://github.com/python/cpython/issues/106883), and beside ``f_back``, which makes an
    # object for the frame, it lets the other thread leave that frame meanwhile.
    with uncollected():
        frames = walk_stack(sys._current_frames().get(thread))
        return [(frame.f_code, line) for frame, line in frames]


def user_call(thread: int) -> str:
    """The outermost call of torch or shardwise: ``"`model.state_dict()` at train.py:41"``.

    ``""`` if ``thread`` is in none, or no program of the user's has called it.
    """
    stack = [(code.co_filename, line) for code, line in _stack(thread)]
    called = [
        depth
        for depth, (file, _) in enumerate(stack)
        if file.startswith((_TORCH, _SHARDWISE)) and not file.startswith(_STARTERS)
    ]
    for file, line in stack[called[-1] :] if called else ():
        if not file.startswith((_TORCH, _SHARDWISE, *_INSTALLED, "<frozen")):
            text = linecache.getline(file, line).strip()
            return f"{f'`{text}` at ' if text else ''}{Path(file).name}:{line}"
    return ""


def activity() -> str:
    """The work of this process, such as ``"step 12: backward of blocks.3"``."""
    return ", ".join(filter(None, dict.fromkeys(one.activity() for one in list(active))))


def stack_of(thread: int) -> str:
    """The calls of ``thread``, the outermost first: ``"my/train.py:41 main → …"``."""
    return " → ".join(
        f"{'/'.join(Path(code.co_filename).parts[-2:])}:{line} {code.co_name}"
        for code, line in reversed(_stack(thread)[:16])  # the innermost
    )


def joint_call(thread: int) -> bool:
    """Is ``thread`` in a call of torch that ends at once when all ranks have made it?"""
    with uncollected():
        frame: Any = sys._current_frames().get(thread)
        code = frame and frame.f_code
        if not (code and code.co_name in _JOINT and code.co_filename.startswith(_TORCH)):
            return False
        group, tensor = (frame.f_locals.get(name) for name in ("group", "tensor"))
    nbytes = 0 if tensor is None else tensor.nbytes
    return nbytes < 2**20 and group in (None, torch.distributed.group.WORLD)
