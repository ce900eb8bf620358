"""How two checkpoints differ: names, shapes, the largest difference of values, and training state.

Values are read piece by piece, so two models of any size are compared in a few megabytes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.checkpoint.read_requests import ReadRequest, read_into
from shardwise.checkpoint.reader import CheckpointReader, TensorLocation
from shardwise.checkpoint.safetensors_format import dtype_of
from shardwise.checkpoint.save_plan import MODEL, OPTIMIZER, RANKS
from shardwise.convert.catalogue import Catalogue
from shardwise.errors import CheckpointError

PIECE = 1 << 18
"""Elements that are compared at once: 6 MB with all copies."""
ABSENT = object()  # stands for a value that one side lacks
_TRAINING = (OPTIMIZER, RANKS)
_HALF = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # values of a float of 4 bits (E2M1)
_FOUR_BITS = torch.tensor([*_HALF, *(-value for value in _HALF)], dtype=torch.float64)

TensorKey = tuple[str, str]
"""Kind (``"model"``, ``"optimizer"`` …) and name of a tensor."""
_Stored = tuple[CheckpointReader, TensorLocation]


class Change(NamedTuple):
    """A value that differs; ``ABSENT`` stands for none."""

    place: str  # such as "optimizers[0].groups[0].options.lr"
    one: Any
    other: Any


class UnequalTensor(NamedTuple):
    """A tensor that both have, and whose dtype, shape or bytes differ."""

    kind: str
    name: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    max_abs_diff: float  # infinite where shapes differ, or a NaN or an infinity has no equal


@dataclass(frozen=True)
class Difference:
    """Everything in which two checkpoints differ."""

    only: tuple[Mapping[str, list[str]], Mapping[str, list[str]]]  # of each: kind → names
    tensors: tuple[UnequalTensor, ...] = ()
    equal: int = 0  # number of tensors that do not differ
    training: tuple[Change, ...] = ()
    only_tensors: bool = False  # training state was not compared

    @property
    def is_empty(self) -> bool:
        """Are they equal?"""
        return not (any(self.only) or self.tensors or self.training)


def _tensors(catalogue: Catalogue, weights_only: bool) -> dict[TensorKey, TensorLocation]:
    if catalogue.problems:
        raise CheckpointError(catalogue.problems[0])
    groups = {kind: listing for kind, listing in catalogue.groups.items() if listing}
    if weights_only:
        kinds = [MODEL] if MODEL in groups else [k for k in groups if k not in _TRAINING]
        groups = {kind: groups[kind] for kind in kinds}
    if not groups:
        raise CheckpointError(
            f"{catalogue.path} holds no tensors that could be compared. Name a folder or a file "
            "that holds some; `shardwise export` converts those of torch."
        )
    return {(kind, name): place for kind in groups for name, place in groups[kind].items()}


def compare(one: Catalogue, other: Catalogue, weights_only: bool = False) -> Difference:
    """Find all differences; with ``weights_only``, of parameters and buffers alone."""
    x, y = _tensors(one, weights_only), _tensors(other, weights_only)
    only_tensors = weights_only or one.manifest is None or other.manifest is None
    a, b = (None if only_tensors else (c.training or ABSENT) for c in (one, other))
    both = [key for key in x if key in y]
    with CheckpointReader.open(one.path) as first, CheckpointReader.open(other.path) as second:
        compared = (_unequal(key, (first, x[key]), (second, y[key])) for key in both)
        unequal = tuple(tensor for tensor in compared if tensor is not None)
    return Difference(
        (_only(x, y), _only(y, x)),
        unequal,
        len(both) - len(unequal),
        tuple(changes_between(a, b)),
        only_tensors,
    )


def _only(tensors: Iterable[TensorKey], others: Container[TensorKey]) -> dict[str, list[str]]:
    """Names, by kind, of tensors that the others lack."""
    names: dict[str, list[str]] = {}
    for kind, name in (key for key in tensors if key not in others):
        names.setdefault(kind, []).append(name)
    return names


def _unequal(key: TensorKey, a: _Stored, b: _Stored) -> UnequalTensor | None:
    one, other = a[1].stored, b[1].stored
    are_equal, largest, numel = one.dtype == other.dtype, 0.0, prod(one.shape)
    if one.shape != other.shape:
        are_equal, largest, numel = False, inf, 0
    for start in range(0, numel, PIECE):
        count = min(PIECE, numel - start)
        x, y = _values(*a, start, count), _values(*b, start, count)
        if x.dtype != y.dtype or not torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            are_equal, largest = False, max(largest, _max_abs_diff(x, y))
    if are_equal:
        return None
    return UnequalTensor(*key, (one.dtype, other.dtype), (one.shape, other.shape), largest)


def _values(source: CheckpointReader, place: TensorLocation, start: int, count: int) -> Tensor:
    values = torch.empty(count, dtype=dtype_of(place.stored.dtype))
    read_into(source, [ReadRequest(place, start, values)])
    return values


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
