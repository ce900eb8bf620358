"""Names that differ in numbers alone, as one.

model.layers.0.mlp.up.weight  …  model.layers.31.mlp.up.weight
model.layers.{0…31}.mlp.up.weight
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

_NUMBER = re.compile(r"(?<![^./])(0|[1-9][0-9]{0,8})(?![^.])")
MAX_NUMBERS = 16  # numbers in a name; one with more is not grouped
MAX_RANGES = 6  # ranges of numbers that are written out

Numbers = tuple[int, ...]
IndexSets = tuple[Numbers, ...]
"""For each position of a number in a name, the numbers that occur there; all combinations do."""


class NameGroup(NamedTuple):
    """Names that differ in nothing but numbers."""

    name: str  # the pattern, such as ``layers.{0…31}.weight``
    size: int  # the number of names
    kind: Any  # that all of them have


def group_names(names: Iterable[tuple[str, Hashable]]) -> list[NameGroup]:
    """Group pairs of name and kind: names of one kind that differ only in numbers are one group."""
    numbers_of: dict[tuple[tuple[str, ...], Hashable], list[Numbers]] = {}
    for name, kind in names:
        parts = _NUMBER.split(name)
        parts = parts if len(parts) <= 2 * MAX_NUMBERS + 1 else [name]
        numbers = tuple(int(part) for part in parts[1::2])
        numbers_of.setdefault((tuple(parts[::2]), kind), []).append(numbers)
    return [
        NameGroup(_name(texts, index_set), prod(map(len, index_set)), kind)
        for (texts, kind), numbers in numbers_of.items()
        for index_set in _index_sets(numbers)
    ]


def _index_sets(numbers: Sequence[Numbers]) -> list[IndexSets]:
    """The fewest products of sets whose union is ``numbers``, split by the first number first."""
    if not numbers[0]:
        return [()]
    rests_by_first: dict[int, list[Numbers]] = {}
    for first, *rest in numbers:
        rests_by_first.setdefault(first, []).append(tuple(rest))
    firsts_by_sets: dict[tuple[IndexSets, ...], list[int]] = {}
    for first, members in rests_by_first.items():
        firsts_by_sets.setdefault(tuple(_index_sets(members)), []).append(first)
    return [(tuple(firsts), *s) for all_sets, firsts in firsts_by_sets.items() for s in all_sets]


def _name(texts: Sequence[str], index_set: IndexSets) -> str:
    words = [texts[0]]
    for numbers, text in zip(index_set, texts[1:], strict=True):
        words += [_range(numbers), text]
    return "".join(words)


def _range(numbers: Numbers) -> str:
    """``(0, 1, 2, 5)`` → ``"{0…2,5}"``."""
    ordered = sorted(numbers)
    if len(ordered) == 1:
        return str(ordered[0])
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    if len(runs) > MAX_RANGES:
        return f"{{{len(ordered)} of {ordered[0]}…{ordered[-1]}}}"
    return "{" + ",".join("…".join(map(str, run)) for run in runs) + "}"
