"""What a step copies, and for whom: seen by a dispatch mode.

A copy is put down to the innermost function on the stack that belongs to an engine, so that the
model's own copies (a transpose made contiguous, a cast) are not in an engine's account. One of
parameters is an *own slice* if it writes no more than one rank's part of the largest unit: what
must be cast before it is sent. Anything larger moves what was gathered once more.

The mode slows the host down several times: no other number is taken from its steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import benchmarks
import shardwise
from benchmarks.harness.copies import COPY_IN, COPYING, FILL_OUT, copied_bytes, operation

PARAMETERS, GRADIENTS, ENGINE, MODEL = "parameters", "gradients", "engine", "model"
COLLECTIVES, UPDATE = "collectives", "update"
PARTS = ("own slice", "whole")
SIDES = (*(f"{PARAMETERS}, {part}" for part in PARTS), GRADIENTS, ENGINE, UPDATE, MODEL)
"""Whose copies there are. ``engine``: of an engine, but neither side. (What stands for a collective
is no copy.)"""

# file → side
FILES = {
    "shardwise/memory/parameters.py": PARAMETERS,
    "shardwise/memory/sent.py": PARAMETERS,
    "shardwise/memory/gradients.py": GRADIENTS,
    "shardwise/comm/reduction.py": GRADIENTS,  # the sum of what arrived
    "torch/distributed/fsdp/_fully_shard/_fsdp_param.py": PARAMETERS,
    "benchmarks/gpu/simulated.py": COLLECTIVES,
}
# folder → side, for the rest of an engine
FOLDERS = {
    "torch/optim/": UPDATE,
    "shardwise/optim/": UPDATE,
    "shardwise/train/": MODEL,
    "shardwise/": ENGINE,
    "torch/distributed/fsdp/": ENGINE,
}
# both sides of fsdp2 are in this file
FSDP_COLLECTIVES = "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"
FUNCTIONS = {
    "foreach_all_gather": PARAMETERS,
    "foreach_all_gather_copy_out": PARAMETERS,
    "_get_param_all_gather_inputs": PARAMETERS,
    "foreach_reduce": GRADIENTS,
    "foreach_reduce_scatter_copy_in": GRADIENTS,
}

Frame = tuple[str, str]
"""A file as ``file_in_package`` names it, and a function's name."""

# name → the folder that it is in; not by name alone, since a checkout may be called shardwise
PACKAGES = {
    package.__name__: Path(str(package.__file__)).parents[1].as_posix()
    for package in (shardwise, torch, benchmarks)
}


def file_in_package(file: str) -> str:
    """``/src/shardwise/comm/mesh.py → shardwise/comm/mesh.py``; ``""`` outside of ``PACKAGES``."""
    inside = (folder for name, folder in PACKAGES.items() if file.startswith(f"{folder}/{name}/"))
    return file[len(folder) + 1 :] if (folder := next(inside, "")) else ""


def side_of(frames: Iterable[Frame]) -> str:
    """Whose work the innermost ``frames``, innermost first, are."""
    for file, function in frames:
        if file == FSDP_COLLECTIVES and function in FUNCTIONS:
            return FUNCTIONS[function]
        if file in FILES:
            return FILES[file]
        if file == FSDP_COLLECTIVES:
            continue  # a small function of the file: who calls it knows
        for folder, side in FOLDERS.items():
            if file.startswith(folder):
                return side
    return MODEL


@dataclass(frozen=True)
class Copied:
    """One copy."""

    side: str  # one of ``SIDES``
    op: str  # torch's name of the operation
    nbytes: int  # written


class CopyRecorder(TorchDispatchMode):
    """Records each copy. ``slice_numel``: elements of one rank's part of the largest unit."""

    def __init__(self, slice_numel: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[Copied] = []
        self._slice = slice_numel * 1.02 + 1_024  # layouts pad

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result, name = func(*args, **kwargs), operation(func)
        side = side_of(_frames()) if name in COPYING else COLLECTIVES
        if side != COLLECTIVES:
            if side == PARAMETERS:
                side = f"{side}, {PARTS[_numel(name, args, kwargs) > self._slice]}"
            self.copies.append(Copied(side, name, copied_bytes(name, args, kwargs, result)))
        return result


def _frames() -> Iterator[Frame]:
    """The frames of this thread, innermost first."""
    frame = sys._getframe()  # noqa: SLF001 - `traceback` reads source files
    while frame is not None:
        yield file_in_package(frame.f_code.co_filename), frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]


def _numel(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Elements that operation ``name`` writes."""
    if name == COPY_IN:
        return int(args[3])
    tensors = tree_leaves(kwargs["out"] if name in FILL_OUT else args[0])
    return sum(tensor.numel() for tensor in tensors if isinstance(tensor, Tensor))
