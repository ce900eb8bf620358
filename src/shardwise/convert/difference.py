"""Where two checkpoints differ: names, shapes, values, and how training stood.

Values are read piece by piece, so two models of any size are compared in a few megabytes. Where
both have checksums of blocks that begin at like places, as two checkpoints of one run do, blocks
with equal checksums are equal and are not read: a checkpoint is compared with its copy at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.contents import MODEL, OPTIMIZER, RANKS
from shardwise.checkpoint.dtypes import dtype_of, itemsize
from shardwise.checkpoint.manifest import NAME as MANIFEST
from shardwise.checkpoint.plan import BLOCK
from shardwise.checkpoint.source import Place, Source
from shardwise.checkpoint.state import NAME as TRAINING
from shardwise.convert.catalogue import stem_of
from shardwise.errors import CheckpointError

__all__ = ["ABSENT", "Change", "Difference", "Unlike", "compare", "unlike_fields"]

PIECE = 1 << 18
"""Elements that are compared at once: 6 MB with what is computed from them."""
ABSENT = object()
"""Stands for a value that one side does not have."""
_HALF = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # what a float of 4 bits (E2M1) can be
_FOUR_BITS = torch.tensor([*_HALF, *(-value for value in _HALF)], dtype=torch.float64)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INDEX = ".safetensors.index.json"
_TRAINING = (OPTIMIZER, RANKS)


class Change(NamedTuple):
    """A value that differs between two training states, or a file between two folders.

    Attributes:
        place: such as ``"optimizers[0].groups[0].options.lr"``.
        one, other: what each side has, or ``ABSENT``.
    """

    place: str
    one: Any
    other: Any


@dataclass(frozen=True)
class Unlike:
    """A tensor that both have, and not alike.

    Attributes:
        stem: ``"model"``, ``"optimizer"`` …
        name: the tensor's.
        dtypes, shapes: as each side stores it.
        numel: elements; of the first.
        differing: elements that differ; all, where shapes do.
        largest: absolute difference; infinite where a NaN or an infinity has no equal.
        relative: the largest difference as a part of the larger of the two values.
    """

    stem: str
    name: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    numel: int
    differing: int
    largest: float
    relative: float


@dataclass(frozen=True)
class Difference:
    """Everything in which two checkpoints differ.

    Attributes:
        only: for each side, the tensors that the other has not: by kind, names.
        tensors: what both have and is not alike.
        alike: tensors that are equal.
        fields: of the training state.
        files: small files, such as ``config.json``, and their digests.
        read, nbytes: bytes that had to be read of the first, and all of its tensors that the
            other has in the same shape.
        ties: names that each side ties to a tensor, and not to the same one.
        tensors_alone: nothing but tensors was compared.
    """

    only: tuple[Mapping[str, list[str]], Mapping[str, list[str]]]
    tensors: tuple[Unlike, ...]
    alike: int
    fields: tuple[Change, ...]
    files: tuple[Change, ...]
    read: int
    nbytes: int
    ties: tuple[Change, ...] = ()
    tensors_alone: bool = False

    @property
    def is_empty(self) -> bool:
        """Are they equal?"""
        return not (any(self.only) or self.tensors or self.fields or self.files or self.ties)


def _kind(stem: str) -> str:
    """``"model.rank0" → "model"``, of local shards."""
    return stem.split(".rank", maxsplit=1)[0]


@dataclass
class _Side:
    """One of the two."""

    source: Source
    weights_only: bool
    read: int = 0
    _sums: dict[str, list[int]] = field(default_factory=dict)

    @cached_property
    def tensors(self) -> dict[tuple[str, str], Place]:
        """By kind and name."""
        files: dict[str, list[str]] = {MODEL: []}
        for name in self.source.listed():
            if stem := stem_of(name):
                files.setdefault(stem, []).append(name)
        found = {stem: self._places(stem, some) for stem, some in files.items()}
        if self.weights_only:
            models = {stem: some for stem, some in found.items() if some and _kind(stem) == MODEL}
            found = models or {s: some for s, some in found.items() if _kind(s) not in _TRAINING}
        places = {(stem, name): p for stem, some in found.items() for name, p in some.items()}
        if not places:
            raise CheckpointError(
                f"{self.source.folder} holds no tensors in safetensors files, so there is nothing "
                "to compare. Name a folder or a file that holds some; `shardwise export` converts "
                "those of torch."
            )
        return places

    def _places(self, stem: str, files: list[str]) -> dict[str, Place]:
        """By the stem's index or single file; numbered files without an index, as they are."""
        return self.source.tensors(stem) or self.source.tensors_in(files)

    @cached_property
    def aliases(self) -> Mapping[str, str]:
        """Further names of tied tensors → the stored one."""
        return {} if self.source.manifest is None else self.source.manifest.aliases

    @cached_property
    def further(self) -> dict[str, list[str]]:
        """The same the other way round."""
        found: dict[str, list[str]] = {}
        for alias, name in self.aliases.items():
            found.setdefault(name, []).append(alias)
        return found

    def find(self, other: _Side, key: tuple[str, str]) -> Place | None:
        """The other side's tensor here: by its name, or by one that either side ties to it."""
        stem, name = key
        names = [name, *other.further.get(name, ())] if stem == MODEL else [name]
        for one in names:
            tied = self.aliases.get(one, one) if stem == MODEL else one
            if place := self.tensors.get((stem, one)) or self.tensors.get((stem, tied)):
                return place
        return None

    def sums(self, file: str) -> list[int]:
        """Checksums of a file's blocks; none where there is no manifest."""
        if file not in self._sums:
            manifest = self.source.manifest
            self._sums[file] = [] if manifest is None else manifest.files[file].checksums()
        return self._sums[file]

    def values(self, place: Place, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)``, checked."""
        item = itemsize(place.stored.dtype)
        data = np.empty((stop - start) * item, np.uint8)
        self.source.read_into(place.file, place.stored.start + start * item, data)
        self.read += len(data)
        return torch.from_numpy(data).view(dtype_of(place.stored.dtype))

    @property
    def training(self) -> Any:
        there = not self.weights_only and self.source.manifest is not None
        return self.source.json(TRAINING) if there and self.source.has(TRAINING) else ABSENT

    @property
    def small(self) -> dict[str, str]:
        """Digests of files that hold no tensors, where the folder says which are its own."""
        manifest = self.source.manifest
        if manifest is None or self.weights_only:
            return {}
        return {
            name: record.digest
            for name, record in manifest.files.items()
            if not stem_of(name) and not name.endswith(_INDEX) and name not in (TRAINING, MANIFEST)
        }


def compare(one: Source, other: Source, weights_only: bool = False) -> Difference:
    """Find all differences.

    Args:
        weights_only: nothing but parameters and buffers.

    Raises:
        CheckpointError: bytes that had to be read are missing or damaged, or a side has no tensors.
    """
    a, b = _Side(one, weights_only), _Side(other, weights_only)
    unlike, alike, nbytes = [], 0, 0
    for key, place in a.tensors.items():
        there = b.find(a, key)
        if there is None:
            continue
        if place.stored.shape == there.stored.shape:
            nbytes += place.stored.stop - place.stored.start
        found = _unlike(key, (a, place), (b, there))
        if found is None:
            alike += 1
        else:
            unlike.append(found)
    both = one.manifest is not None and other.manifest is not None
    return Difference(
        (_only(a, b), _only(b, a)),
        tuple(unlike),
        alike,
        tuple(unlike_fields(a.training, b.training)),
        tuple(unlike_fields(a.small, b.small)) if both else (),
        a.read,
        nbytes,
        tuple(_ties(a, b)),
        weights_only or not both,
    )


def _ties(a: _Side, b: _Side) -> Iterator[Change]:
    """Names that both tie, and not to the same tensor. What one ties alone is found by ``find``."""
    for alias in sorted(a.aliases.keys() & b.aliases.keys()):
        one, other = a.aliases[alias], b.aliases[alias]
        if b.aliases.get(one, one) != other:
            yield Change(alias, one, other)


def _only(side: _Side, other: _Side) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for stem, name in side.tensors:
        if other.find(side, (stem, name)) is None:
            found.setdefault(stem, []).append(name)
    return found


_Stored = tuple[_Side, Place]


def _unlike(key: tuple[str, str], one: _Stored, other: _Stored) -> Unlike | None:
    (a, b), numel = (one[1].stored, other[1].stored), prod(one[1].stored.shape)
    differing, most, part = (0, 0.0, 0.0) if a.shape == b.shape else (numel, inf, inf)
    if a.shape == b.shape:
        for start in range(0, numel, PIECE):
            stop = min(numel, start + PIECE)
            if not _are_known_equal(one, other, start, stop):
                x, y = (side.values(place, start, stop) for side, place in (one, other))
                count, largest, relative = _distance(x, y)
                differing, most, part = differing + count, max(most, largest), max(part, relative)
    if differing == 0 and (a.dtype, a.shape) == (b.dtype, b.shape):
        return None
    dtypes, shapes = (a.dtype, b.dtype), (a.shape, b.shape)
    return Unlike(*key, dtypes, shapes, numel, differing, most, part)


def _are_known_equal(one: _Stored, other: _Stored, start: int, stop: int) -> bool:
    """Have the blocks that these elements are in the same checksums on both sides?"""
    (a, here), (b, there) = one, other
    shift = there.stored.start - here.stored.start
    if here.stored.dtype != there.stored.dtype or shift % BLOCK:
        return False
    item = itemsize(here.stored.dtype)
    lo, hi = (here.stored.start + k * item for k in (start, stop))
    first, last = lo // BLOCK, -(-hi // BLOCK)
    x = a.sums(here.file)[first:last]
    y = b.sums(there.file)[first + shift // BLOCK : last + shift // BLOCK]
    return bool(x) and x == y


def _distance(x: Tensor, y: Tensor) -> tuple[int, float, float]:
    """How many differ, the largest difference, and the largest relative one."""
    if x.dtype == y.dtype:
        bits = _BITS[x.dtype.itemsize]
        unlike = x.view(bits) != y.view(bits)
        count = int(unlike.sum())
        x, y = (_exact(z.view(bits)[unlike].view(z.dtype)) for z in (x, y))
    else:
        x, y = _exact(x), _exact(y)
        unlike = (x != y) & ~(x.isnan() & y.isnan())
        count = int(unlike.sum())
        x, y = x[unlike], y[unlike]
    if not count:
        return 0, 0.0, 0.0
    away, scale = (x - y).abs(), torch.maximum(x.abs(), y.abs())
    away[~away.isfinite()] = inf
    relative = (away / scale).nan_to_num(nan=0.0)  # 0 and -0 differ by nothing of nothing
    relative[away.isinf()] = inf
    return count, float(away.max()), float(relative.max())


def _exact(values: Tensor) -> Tensor:
    if values.dtype == torch.float4_e2m1fn_x2:
        pairs = values.view(torch.uint8).long()
        return _FOUR_BITS[torch.stack([pairs & 15, pairs >> 4])]
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def unlike_fields(one: Any, other: Any, place: str = "") -> Iterator[Change]:
    """Every place at which two JSON values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys([*one, *other]):
            inner = f"{place}.{key}" if place else str(key)
            yield from unlike_fields(one.get(key, ABSENT), other.get(key, ABSENT), inner)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for k, pair in enumerate(zip(one, other, strict=True)):
            yield from unlike_fields(*pair, f"{place}[{k}]")
    elif type(one) is not type(other) or one != other:
        yield Change(place, one, other)
