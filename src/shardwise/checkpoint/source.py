"""A checkpoint's folder, opened for reading: tensors by name, bytes that were checked.

With a manifest, whatever is read is read by whole blocks, each checked against its checksum, and
no block twice in a row. A plain Hugging Face folder has none: then bytes are read as they are.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from shardwise.checkpoint import checksum
from shardwise.checkpoint.complete import check_complete
from shardwise.checkpoint.disk import check_is_folder, explained, is_unreadable
from shardwise.checkpoint.folder import resolve
from shardwise.checkpoint.header import CAP, Header, Stored, decode, length_of
from shardwise.checkpoint.manifest import NAME, Manifest
from shardwise.checkpoint.names import inside, is_plain
from shardwise.checkpoint.plan import BLOCK
from shardwise.errors import CheckpointError

__all__ = ["Bytes", "Place", "Source"]

VECTORS = 512  # pieces of memory in one system call; Linux allows 1,024
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Place(NamedTuple):
    """Where a tensor is: in which file, and there."""

    file: str
    stored: Stored


@dataclass
class _Kept:
    """The one block that is in memory, whatever the number of files: whose it is, and which."""

    owner: _File | None = None
    number: int = -1

    @cached_property
    def buffer(self) -> Bytes:
        return np.empty(BLOCK, np.uint8)


@dataclass
class Source:
    """An open checkpoint. Use it as a context.

    Attributes:
        folder: where it is.
        manifest: what it should consist of; ``None`` for a folder that shardwise did not write.
    """

    folder: Path
    manifest: Manifest | None
    _files: dict[str, _File] = field(default_factory=dict, repr=False)
    _kept: _Kept = field(default_factory=_Kept, repr=False)
    _stack: ExitStack = field(default_factory=ExitStack, repr=False)

    @classmethod
    def open(cls, path: str | Path) -> Source:
        """Open the checkpoint that ``path`` means: a folder, ``latest``, or one safetensors file.

        Raises:
            CheckpointError: there is none, or it is not complete.
        """
        given = Path(path).expanduser().absolute()
        with explained(f"opening {given}", reads=True):
            found = resolve(given)
            if found.is_file():
                return _Single(found.parent, None, only=found.name)
            check_is_folder(found)
            present = (found / NAME).exists() or (found / NAME).is_symlink()
            return cls(found, check_complete(found) if present else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def title(self) -> str:
        """The folder's name, for messages."""
        return str(self.folder)

    def has(self, name: str) -> bool:
        """Is there a file of this name? In a checkpoint of ours: one that the manifest lists."""
        if self.manifest is not None:
            return name in self.manifest.files
        return inside(self.folder, name).is_file()

    def names(self, stem: str) -> list[str]:
        """The safetensors files of ``"model"`` or another stem; none if there are none."""
        if (index := self._index(stem)) is not None:
            return list(dict.fromkeys(index.values()))
        single = f"{stem}.safetensors"
        return [single] if self.has(single) else []

    def listed(self) -> list[str]:
        """The names of its files: those of the manifest, or all that are in the folder."""
        if self.manifest is not None:
            return list(self.manifest.files)
        with explained(f"looking into {self.folder}", reads=True):
            return sorted(path.name for path in self.folder.iterdir() if path.is_file())

    def _index(self, stem: str) -> dict[str, str] | None:
        """Which file of a stem holds which tensor; ``None`` where no index says it."""
        name = f"{stem}.safetensors.index.json"
        if not self.has(name):
            return None
        found = self.json(name)
        weights = found.get("weight_map") if isinstance(found, dict) else None
        if not isinstance(weights, dict) or not weights:
            raise CheckpointError(
                f"{self.folder / name} has no weight_map that says which file holds what. Fetch "
                "or write it again."
            )
        for file in weights.values():
            if not is_plain(file):
                inside(self.folder, file)  # raises, and says why
        return weights

    def tensors(self, stem: str) -> dict[str, Place]:
        """Every tensor of a stem, by name.

        Raises:
            CheckpointError: a file is missing or malformed, two hold a tensor of one name, the
                index names one that is in none, or the manifest ties a name to such a one.
        """
        index = self._index(stem) or {}
        found = self.tensors_in(self.names(stem))
        if lost := [name for name in index if name not in found]:
            more = f" and {len(lost) - 1:,} more" * (len(lost) > 1)
            raise CheckpointError(
                f"{self.folder}: the index says that {lost[0]!r:.200}{more} is in "
                f"{index[lost[0]]!r:.80}, and it is not. The index or the file is of another "
                "model; fetch both again."
            )
        if stem == "model":
            self._check_ties(found)
        return found

    def _check_ties(self, found: Mapping[str, Place]) -> None:
        """Local shards have the names of their ranks, and each rank has a part of them only."""
        if self.manifest is None or self.manifest.kind == "local":
            return
        for alias, name in self.manifest.aliases.items():
            if alias in found or name not in found:
                fact = f"{alias!r:.200} is stored, too" if alias in found else "that is not stored"
                raise CheckpointError(
                    f"{self.folder / NAME} ties {alias!r:.200} to {name!r:.200}, and {fact}. It "
                    "does not fit the files beside it; load another checkpoint."
                )

    def tensors_in(self, names: Iterable[str]) -> dict[str, Place]:
        """Every tensor of some files, by name.

        Raises:
            CheckpointError: a file is missing or malformed, or two hold a tensor of one name.
        """
        found: dict[str, Place] = {}
        for name in names:
            inside(self.folder, name)
            if not self.has(name):
                raise CheckpointError(
                    f"{self.folder}: {name} is missing, and the index says that it holds tensors. "
                    "Fetch it again, or load another checkpoint."
                )
            for tensor, stored in self.header(name).tensors.items():
                if tensor in found:
                    raise CheckpointError(
                        f"{self.folder}: {found[tensor].file} and {name} both hold {tensor!r}, so "
                        "it is not clear which is meant. Remove what does not belong there."
                    )
                found[tensor] = Place(name, stored)
        return found

    def header(self, name: str) -> Header:
        """A file's header, checked against the file's size."""
        file = self._file(name)
        length = length_of(bytes(file.read(0, min(8, file.size))), file.size, file.title)
        return decode(bytes(file.read(8, 8 + length)), file.size, file.title)

    def bytes(self, name: str) -> bytes:
        """A small file, whole and checked."""
        file = self._file(name)
        if file.size > CAP:
            raise CheckpointError(
                f"{file.title} has {file.size:,} bytes; {CAP:,} at most are expected of it. "
                "Load another checkpoint."
            )
        return bytes(file.read(0, file.size))

    def json(self, name: str) -> Any:
        """A small JSON file, checked and parsed."""
        try:
            return json.loads(self.bytes(name))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{self.folder / name} is not JSON ({str(error)[:200]}). Fetch or write it again."
            ) from None

    def read(self, name: str, start: int, stop: int) -> Iterator[tuple[int, Bytes]]:
        """Bytes ``[start, stop)`` of a file, checked: ``(place in the file, some of them)``.

        What is yielded is overwritten by the next.
        """
        file = self._file(name)
        while start < stop:
            data = file.some(start, stop)
            yield start, data
            start += len(data)

    def read_into(self, name: str, start: int, *into: Bytes) -> None:
        """Fill arrays, one after the other, with the bytes from ``start`` on, checked.

        Whole blocks go straight there, also where they are of several arrays.
        """
        file, at, left = self._file(name), start, deque(into)
        stop = start + sum(map(len, into))
        while at < stop:
            if file.is_block(at, stop):
                count = file.end_of(at, stop) - at
                file.block_into(at, _taken(left, count))
            else:
                data = file.some(at, stop)
                count, done = len(data), 0
                for piece in _taken(left, count):
                    piece[:] = data[done : done + len(piece)]
                    done += len(piece)
            at += count

    def damaged(self, name: str) -> list[int]:
        """The blocks of a file whose bytes are not those that were written. Reads all of it.

        Raises:
            CheckpointError: the disk does not let it be read, so nobody knows.
        """
        return self._file(name).damaged()

    def _file(self, name: str) -> _File:
        if name not in self._files:
            path = inside(self.folder, name)
            with explained(f"opening {path}", reads=True):
                opened = os.open(path, os.O_RDONLY)
            self._stack.callback(os.close, opened)
            record = None if self.manifest is None else self.manifest.files[name]
            sums = None if record is None else record.checksums()
            size = os.fstat(opened).st_size
            self._files[name] = _File(str(path), opened, size, sums, self._kept)
        return self._files[name]


@dataclass
class _Single(Source):
    """One safetensors file, wherever it lies."""

    only: str = ""

    def names(self, stem: str) -> list[str]:
        return [self.only] if stem == "model" else []

    def has(self, name: str) -> bool:
        return name == self.only

    def listed(self) -> list[str]:
        return []  # what lies beside it is not its own


@dataclass(eq=False)
class _File:
    """An open file: its bytes, with their checksums if they are known."""

    title: str
    opened: int
    size: int
    sums: Sequence[int] | None
    kept: _Kept

    def read(self, start: int, stop: int) -> Bytes:
        """A copy of the bytes ``[start, stop)``, checked."""
        found = np.empty(stop - start, np.uint8)
        at = start
        while at < stop:
            data = self.some(at, stop)
            found[at - start : at - start + len(data)] = data
            at += len(data)
        return found

    def some(self, start: int, stop: int) -> Bytes:
        """The first bytes of ``[start, stop)``, checked; the next call overwrites them."""
        kept = self.kept
        if self.sums is None:
            kept.owner, data = None, kept.buffer[: min(stop - start, BLOCK)]
            self._fill(start, data)
            return data
        number = start // BLOCK
        first, last = number * BLOCK, min(self.size, (number + 1) * BLOCK)
        if not self._keeps(number):
            kept.owner = None
            self._fill(first, kept.buffer[: last - first])
            self._check(number, kept.buffer[: last - first])
            kept.owner, kept.number = self, number
        return kept.buffer[start - first : min(stop, last) - first]

    def _keeps(self, number: int) -> bool:
        return self.kept.owner is self and self.kept.number == number

    def is_block(self, at: int, stop: int) -> bool:
        """Does a whole block begin at ``at`` and end before ``stop``, and is it not here yet?"""
        if self.sums is None:
            return True
        return (
            at % BLOCK == 0 and stop >= min(self.size, at + BLOCK) and not self._keeps(at // BLOCK)
        )

    def end_of(self, at: int, stop: int) -> int:
        """Up to where ``block_into`` reads at once."""
        return stop if self.sums is None else min(stop, at + BLOCK)

    def block_into(self, at: int, pieces: Sequence[Bytes]) -> None:
        """Read the block at ``at`` straight to where it belongs."""
        self._fill(at, *pieces)
        if self.sums is not None:
            self._check(at // BLOCK, *pieces)

    def damaged(self) -> list[int]:
        found = []
        for number in range(len(self.sums or ())):
            first, last = number * BLOCK, min(self.size, (number + 1) * BLOCK)
            try:
                self.some(first, last)
            except CheckpointError as error:
                if is_unreadable(error):
                    raise
                found.append(number)
        return found

    def _fill(self, at: int, *pieces: Bytes) -> None:
        left = deque(pieces)
        with explained(f"reading {self.title}", reads=True):
            while left:
                views = [piece.data for piece in islice(left, VECTORS)]
                done = os.preadv(self.opened, views, at)
                if done == 0:
                    raise CheckpointError(
                        f"{self.title} ends at byte {at:,}, {sum(map(len, left)):,} before it "
                        "should. It was cut off. Load another checkpoint, or fetch the file again."
                    )
                _taken(left, done)
                at += done

    def _check(self, number: int, *pieces: Bytes) -> None:
        assert self.sums is not None
        found = 0
        for piece in pieces:
            found = checksum.running(piece, found)
        if found != self.sums[number]:
            first, length = number * BLOCK, sum(map(len, pieces))
            raise CheckpointError(
                f"{self.title} is damaged: bytes {first:,} to {first + length:,} are not those "
                f"that were written (block {number} of {len(self.sums)}). Load another "
                "checkpoint, or restore this file from a copy."
            )


def _taken(left: deque[Bytes], count: int) -> list[Bytes]:
    """The next ``count`` bytes of what is still to be filled; they are gone from ``left``."""
    found = []
    while count:
        piece = left.popleft()
        if len(piece) > count:
            left.appendleft(piece[count:])
        found.append(piece[:count])
        count -= len(found[-1])
    while left and not len(left[0]):
        left.popleft()
    return found
