"""This process's end of ``worker``: what a foreign checkpoint holds, and its tensors' bytes.

A worker that opened a hostile pickle is hostile. So whatever it says is bounded and checked like
the header of a file from the net, and nothing of it is ever unpickled, called or imported.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.checkpoint.disk import explained
from shardwise.checkpoint.dtypes import DTYPES
from shardwise.convert import worker
from shardwise.convert.talk import Bytes, Silent, Talk
from shardwise.errors import CheckpointError

__all__ = ["FLAG", "Foreign", "Tensor", "Value", "opened"]

FLAG = "trust=True (on the command line: --trust-source)"
WORDS = {str(dtype).removeprefix("torch."): code for code, dtype in DTYPES.items()}

Part = str | int
DEEPEST = 64
"""Lists and dicts inside of each other; options have two or three."""


@dataclass(frozen=True)
class Tensor:
    """A tensor in a foreign checkpoint.

    Attributes:
        path: keys of dicts and places in lists that lead to it.
        dtype: as safetensors calls it.
        number: by which the worker knows it.
    """

    path: tuple[Part, ...]
    dtype: str
    shape: tuple[int, ...]
    number: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Value:
    """A plain value, encoded as ``shardwise.checkpoint.plain`` does."""

    path: tuple[Part, ...]
    value: Any


@dataclass(frozen=True, eq=False)
class Foreign:
    """A foreign checkpoint, opened by a worker.

    Attributes:
        source: where it is.
        tensors, values: what it holds.
        odd: names of what is neither.
    """

    source: Path
    tensors: tuple[Tensor, ...]
    values: tuple[Value, ...]
    odd: tuple[str, ...]
    _talk: Talk

    def read(self, tensor: Tensor) -> Bytes:
        """A tensor's bytes, ``[nbytes]``; one tensor at a time is in memory.

        Raises:
            CheckpointError: the worker could not read it.
        """
        name = ".".join(map(str, tensor.path))
        try:
            self._talk.ask(f"{tensor.number}\n")
            told = _answer(self._talk.line())
            if told.get("nbytes") != tensor.nbytes:
                raise Silent(_why(told) or f"it has {told.get('nbytes')!s:.40} bytes")
            found = np.empty(tensor.nbytes, np.uint8)
            self._talk.fill(found)
        except (Silent, ValueError, RecursionError) as error:
            raise _failed(self.source, f"{name!r:.200} could not be read: {error}") from None
        return found


@contextmanager
def opened(source: Path, trust: bool) -> Iterator[Foreign]:
    """Open a DCP folder or a pickled file in a worker, which ends with the block.

    Raises:
        CheckpointError: there is none, it needs trust, or it cannot be read.
    """
    with explained(f"opening {source}"):
        if source.is_dir() and not (source / ".metadata").is_file():
            raise CheckpointError(
                f"{source} has no .metadata, so it is no complete DCP folder. Name the folder that "
                "torch.distributed.checkpoint.save wrote, or one pickled file."
            )
        source.stat()
    # -I: without the user's environment and packages, and without what lies in this folder.
    command = [sys.executable, "-I", worker.__file__]
    environment = {"OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
    with subprocess.Popen(  # noqa: S603 - our own file
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env=environment,
        cwd="/",
        start_new_session=True,
    ) as process:
        talk = Talk(process)
        try:
            items = _items(source, talk, trust)
            found = _foreign(source, items, talk)
            _check_size(found)
            yield found
        finally:
            talk.end()


def _items(source: Path, talk: Talk, trust: bool) -> list[Any]:
    try:
        talk.ask(json.dumps({"source": str(source), "trust": trust}) + "\n")
        found = _answer(talk.line())
    except (Silent, ValueError, RecursionError) as error:
        fact = f"the process that opened it gave no answer: {error!s:.200}"
        raise _failed(source, fact) from None
    if "refused" in found:
        raise _refusal(source, _why(found))
    items = found.get("items")
    if not isinstance(items, list):
        raise _failed(source, "the process that opened it gave no list")
    return items


def _answer(line: bytes) -> dict[str, Any]:
    """A line of the worker's, as an object that can be looked through, and written again."""
    found = json.loads(line)
    if not isinstance(found, dict) or not _sound(found, DEEPEST):
        raise ValueError("it is no object, or holds what no checkpoint does")
    return found


def _sound(value: Any, deep: int) -> bool:
    if isinstance(value, str):
        return value.isascii() or not any("\ud800" <= mark <= "\udfff" for mark in value)
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return deep > 0 and all(
            _sound(key, 0) and _sound(inner, deep - 1) for key, inner in value.items()
        )
    return not isinstance(value, list) or (
        deep > 0 and all(_sound(inner, deep - 1) for inner in value)
    )


def _why(told: dict[str, Any]) -> str:
    match told.get("refused"):
        case [str(why)]:
            return "".join(mark if mark.isprintable() else " " for mark in why[:500])
    return ""


def _check_size(found: Foreign) -> None:
    """No more is read, and written, than such a file or folder can hold."""
    total = sum(tensor.nbytes for tensor in found.tensors)
    inside = found.source.rglob("*") if found.source.is_dir() else (found.source,)
    with explained(f"looking through {found.source}", reads=True):
        there = sum(path.stat().st_size for path in inside if path.is_file())
    if total > worker.MOST_TIMES * there:
        raise _failed(found.source, f"it is {there:,} bytes, and its tensors would be {total:,}")


def _refusal(source: Path, text: str) -> CheckpointError:
    if not text.startswith("untrusted"):
        return CheckpointError(
            f"{source} cannot be read: {text}. Look whether it is complete, and written by torch."
        )
    if source.is_dir():
        why = "a DCP folder describes itself by a pickle (.metadata)"
    else:
        why = f"torch's restricted reader refuses it ({text.removeprefix('untrusted ')})"
    return CheckpointError(
        f"{source} was not opened: {why}, and whoever wrote a pickle can run any code where it is "
        f"opened. If you trust its source, pass {FLAG}: it is then opened in a process of its own, "
        "without environment, and without the right to write."
    )


def _failed(source: Path, fact: str) -> CheckpointError:
    return CheckpointError(f"{source}: {fact}. Look whether it is complete, and of torch.")


def _foreign(source: Path, items: list[Any], talk: Talk) -> Foreign:
    tensors, values, odd = [], [], []
    for number, item in enumerate(items):
        path = item.get("path") if isinstance(item, dict) else None
        if not isinstance(path, list) or not all(type(part) in (str, int) for part in path):
            raise _failed(source, f"item {number} has no path")
        if not path:
            raise CheckpointError(
                f"{source} holds one value, or nothing, and no names. Save a dict of tensors by "
                "name, as state_dict() makes it."
            )
        if "dtype" in item:
            tensors.append(_tensor(source, tuple(path), item, number))
        elif "value" in item:
            values.append(Value(tuple(path), item["value"]))
        else:
            odd.append(f"{'.'.join(map(str, path))} ({item.get('type', '?')!s:.80})")
    return Foreign(source, tuple(tensors), tuple(values), tuple(odd), talk)


def _tensor(source: Path, path: tuple[Part, ...], item: dict[str, Any], number: int) -> Tensor:
    shape, dtype, name = item.get("shape"), item.get("dtype"), ".".join(map(str, path))
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
        raise CheckpointError(f"{source}: {name!r:.200} has a shape that no tensor has.")
    if not isinstance(dtype, str) or dtype not in WORDS:
        raise CheckpointError(
            f"{source}: {name!r:.200} is of dtype {dtype!r:.40}, which safetensors has no name "
            "for. Cast it where it was made."
        )
    if len(shape) > 64 or prod(shape) * torch.float64.itemsize >= 1 << 62:
        raise CheckpointError(f"{source}: {name!r:.200} has a shape that no tensor has.")
    return Tensor(path, WORDS[dtype], tuple(shape), number)
