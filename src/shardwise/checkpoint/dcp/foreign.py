"""This process's end of ``worker``: what a foreign checkpoint holds, and its tensors' bytes.

A worker that opened a hostile pickle is hostile. So whatever it says is bounded and checked like
the header of a file from the net, and nothing of it is ever unpickled, called or imported.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from shardwise.checkpoint.dcp import worker
from shardwise.checkpoint.disk import explained
from shardwise.checkpoint.dtypes import DTYPES
from shardwise.checkpoint.header import CAP
from shardwise.errors import CheckpointError

__all__ = ["FLAG", "Foreign", "Tensor", "Value", "opened"]

FLAG = "trust=True (on the command line: --trust-source)"
WORDS = {str(dtype).removeprefix("torch."): code for code, dtype in DTYPES.items()}

Part = str | int
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


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
    _process: subprocess.Popen[bytes]
    _said: IO[bytes]

    def read(self, tensor: Tensor) -> Bytes:
        """A tensor's bytes, ``[nbytes]``; one tensor at a time is in memory.

        Raises:
            CheckpointError: the worker could not read it.
        """
        _ask(self._process, f"{tensor.number}\n")
        found = np.empty(tensor.nbytes, np.uint8)
        at, out = 0, self._process.stdout
        assert out is not None
        while at < len(found):
            data = out.read(min(1 << 22, len(found) - at))
            if not data:
                name = ".".join(map(str, tensor.path))
                raise _failed(self.source, f"{name!r} could not be read", self._said)
            found[at : at + len(data)] = np.frombuffer(data, np.uint8)
            at += len(data)
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
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(  # noqa: S603 - our own file
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env=environment,
            cwd="/",
            start_new_session=True,
        ) as process,
    ):
        try:
            _ask(process, json.dumps({"source": str(source), "trust": trust}) + "\n")
            assert process.stdout is not None
            answer = process.stdout.readline(CAP)
            items = _items(source, answer, said)
            yield _foreign(source, items, process, said)
        finally:
            process.kill()
            with suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.close()


def _ask(process: subprocess.Popen[bytes], text: str) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(text.encode())
        process.stdin.flush()
    except BrokenPipeError:
        return  # it has ended, and what it did not send says so


def _items(source: Path, answer: bytes, said: IO[bytes]) -> list[Any]:
    try:
        found = json.loads(answer)
        refused = found.get("refused")
    except (ValueError, RecursionError, AttributeError):
        raise _failed(source, "the process that opened it gave no answer", said) from None
    if refused is not None:
        raise _refusal(source, str(refused[0])[:500] if refused else "")
    items = found.get("items")
    if not isinstance(items, list):
        raise _failed(source, "the process that opened it gave no list", said)
    return items


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


def _failed(source: Path, fact: str, said: IO[bytes]) -> CheckpointError:
    said.seek(0, 2)
    said.seek(max(0, said.tell() - 2000))
    last = said.read(2000).decode("utf-8", "replace").strip().splitlines()[-1:]
    more = f" ({last[0][:300]})" if last and last[0].isprintable() else ""
    return CheckpointError(f"{source}: {fact}{more}. Look whether it is complete, and of torch.")


def _foreign(
    source: Path, items: list[Any], process: subprocess.Popen[bytes], said: IO[bytes]
) -> Foreign:
    tensors, values, odd = [], [], []
    for number, item in enumerate(items):
        path = item.get("path") if isinstance(item, dict) else None
        if not isinstance(path, list) or not all(type(part) in (str, int) for part in path):
            raise _failed(source, f"item {number} has no path", said)
        if "dtype" in item:
            tensors.append(_tensor(source, tuple(path), item, number))
        elif "value" in item:
            values.append(Value(tuple(path), item["value"]))
        else:
            odd.append(f"{'.'.join(map(str, path))} ({item.get('type', '?')!s:.80})")
    return Foreign(source, tuple(tensors), tuple(values), tuple(odd), process, said)


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
