"""Where two checkpoints differ: names, shapes, the largest difference of values, and training.

Values are read piece by piece, so two models of any size are compared in a few megabytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.reader import CheckpointReader, TensorLocation
from shardwise.checkpoint.safetensors_format import dtype_of, itemsize
from shardwise.checkpoint.save_plan import MODEL, OPTIMIZER, RANKS
from shardwise.checkpoint.training_state import NAME as TRAINING
from shardwise.convert.catalogue import stem_of
from shardwise.convert.writer import INDEX
from shardwise.errors import CheckpointError

__all__ = ["ABSENT", "Change", "Difference", "UnequalTensor", "changes_between", "compare"]

PIECE = 1 << 18
"""Elements that are compared at once: 6 MB with what is computed from them."""
ABSENT = object()
"""Stands for a value that one side does not have."""
_HALF = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # what a float of 4 bits (E2M1) can be
_FOUR_BITS = torch.tensor([*_HALF, *(-value for value in _HALF)], dtype=torch.float64)

TensorKey = tuple[str, str]
"""Kind (``"model"``, ``"optimizer"`` …) and name of a tensor."""


class Change(NamedTuple):
    """A value that differs.

    Attributes:
        place: such as ``"optimizers[0].groups[0].options.lr"``, or the name of a file.
        one, other: what each side has, or ``ABSENT``.
    """

    place: str
    one: Any
    other: Any


class UnequalTensor(NamedTuple):
    """A tensor that both have, and whose dtype, shape or bytes differ.

    Attributes:
        max_abs_diff: infinite where shapes differ, or a NaN or an infinity has no equal.
    """

    kind: str
    name: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    max_abs_diff: float


@dataclass(frozen=True)
class Difference:
    """Everything in which two checkpoints differ.

    Attributes:
        only: for each side, the tensors that the other has not: by kind, names.
        tensors: those that both have and that are not equal.
        equal: how many tensors are.
        training: values of the training state.
        files: small files, such as ``config.json``, and their digests.
        ties: names that each side ties to a tensor, and not to the same one.
        only_tensors: nothing but tensors was compared.
    """

    only: tuple[Mapping[str, list[str]], Mapping[str, list[str]]]
    tensors: tuple[UnequalTensor, ...] = ()
    equal: int = 0
    training: tuple[Change, ...] = ()
    files: tuple[Change, ...] = ()
    ties: tuple[Change, ...] = ()
    only_tensors: bool = False

    @property
    def is_empty(self) -> bool:
        """Are they equal?"""
        return not (any(self.only) or self.tensors or self.training or self.files or self.ties)


@dataclass
class _Side:
    """One of the two."""

    source: CheckpointReader
    weights_only: bool

    @cached_property
    def tensors(self) -> dict[TensorKey, TensorLocation]:
        files: dict[str, list[str]] = {MODEL: []}
        for name in self.source.listed():
            if stem := stem_of(name):
                files.setdefault(stem, []).append(name)
        # By the stem's index or single file; numbered files without an index, as they are.
        by_kind = {s: self.source.tensors(s) or self.source.tensors_in(files[s]) for s in files}
        if self.weights_only:
            others = [kind for kind in by_kind if kind not in (OPTIMIZER, RANKS)]
            by_kind = {kind: by_kind[kind] for kind in ([MODEL] if by_kind[MODEL] else others)}
        places = {(kind, name): p for kind, some in by_kind.items() for name, p in some.items()}
        if not places:
            raise CheckpointError(
                f"{self.source.folder} holds no tensors in safetensors files, so there is nothing "
                "to compare. Name a folder or a file that holds some; `shardwise export` converts "
                "those of torch."
            )
        return places

    @cached_property
    def aliases(self) -> Mapping[str, str]:
        """Further names of tied tensors → the stored one."""
        return {} if self.source.manifest is None else self.source.manifest.aliases

    def find(self, other: _Side, key: TensorKey) -> TensorLocation | None:
        """The other side's tensor here: by its name, or by one that either side ties to it."""
        kind, name = key
        names = [name]
        if kind == MODEL:
            names += [alias for alias, stored in other.aliases.items() if stored == name]
            names += [self.aliases[alias] for alias in names if alias in self.aliases]
        return next((self.tensors[kind, n] for n in names if (kind, n) in self.tensors), None)

    def values(self, place: TensorLocation, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)``, checked."""
        item = itemsize(place.stored.dtype)
        data = np.empty((stop - start) * item, np.uint8)
        self.source.read_into(place.file, place.stored.start + start * item, data)
        return torch.from_numpy(data).view(dtype_of(place.stored.dtype))

    @property
    def training(self) -> Any:
        is_ours = not self.weights_only and self.source.manifest is not None
        return self.source.json(TRAINING) if is_ours and self.source.has(TRAINING) else ABSENT

    @property
    def small(self) -> dict[str, str]:
        """Digests of files that hold no tensors, where the folder says which are its own."""
        manifest = self.source.manifest
        records = {} if manifest is None or self.weights_only else manifest.files
        return {
            name: record.digest
            for name, record in records.items()
            if not stem_of(name) and not name.endswith(INDEX) and name != TRAINING
        }


def compare(
    one: CheckpointReader, other: CheckpointReader, weights_only: bool = False
) -> Difference:
    """Find all differences.

    Args:
        weights_only: nothing but parameters and buffers.

    Raises:
        CheckpointError: bytes are missing or damaged, or a side has no tensors.
    """
    a, b = _Side(one, weights_only), _Side(other, weights_only)
    both = {key: place for key in a.tensors if (place := b.find(a, key)) is not None}
    unequal = [t for key, place in both.items() if (t := _unequal(key, a, b, place)) is not None]
    have_manifests = one.manifest is not None and other.manifest is not None
    return Difference(
        (_only(a, b), _only(b, a)),
        tuple(unequal),
        len(both) - len(unequal),
        tuple(changes_between(a.training, b.training)),
        tuple(changes_between(a.small, b.small)) if have_manifests else (),
        tuple(_ties(a, b)),
        weights_only or not have_manifests,
    )


def _ties(a: _Side, b: _Side) -> Iterator[Change]:
    """Names that both tie, and not to the same tensor. What one ties alone is found by ``find``."""
    for alias in sorted(a.aliases.keys() & b.aliases.keys()):
        one, other = a.aliases[alias], b.aliases[alias]
        if b.aliases.get(one, one) != other:
            yield Change(alias, one, other)


def _only(side: _Side, other: _Side) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for kind, name in side.tensors:
        if other.find(side, (kind, name)) is None:
            names.setdefault(kind, []).append(name)
    return names


def _unequal(key: TensorKey, a: _Side, b: _Side, in_b: TensorLocation) -> UnequalTensor | None:
    in_a = a.tensors[key]
    one, other = in_a.stored, in_b.stored
    are_equal, largest, numel = one.dtype == other.dtype, 0.0, prod(one.shape)
    if one.shape != other.shape:
        are_equal, largest, numel = False, inf, 0
    for start in range(0, numel, PIECE):
        stop = min(numel, start + PIECE)
        x, y = a.values(in_a, start, stop), b.values(in_b, start, stop)
        if x.dtype != y.dtype or not torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            are_equal, largest = False, max(largest, _max_abs_diff(x, y))
    if are_equal:
        return None
    return UnequalTensor(*key, (one.dtype, other.dtype), (one.shape, other.shape), largest)


def _max_abs_diff(x: Tensor, y: Tensor) -> float:
    x, y = _exact(x), _exact(y)
    distance = (x - y).abs()
    distance[(x == y) | (x.isnan() & y.isnan())] = 0.0
    return float(distance.nan_to_num(nan=inf, posinf=inf).max())


def _exact(values: Tensor) -> Tensor:
    if values.dtype == torch.float4_e2m1fn_x2:
        pairs = values.view(torch.uint8).long()
        return _FOUR_BITS[torch.stack([pairs & 15, pairs >> 4])]
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def changes_between(one: Any, other: Any, place: str = "") -> Iterator[Change]:
    """Every place at which two JSON values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys([*one, *other]):
            inner = f"{place}.{key}" if place else str(key)
            yield from changes_between(one.get(key, ABSENT), other.get(key, ABSENT), inner)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for k, pair in enumerate(zip(one, other, strict=True)):
            yield from changes_between(*pair, f"{place}[{k}]")
    elif type(one) is not type(other) or one != other:
        yield Change(place, one, other)
