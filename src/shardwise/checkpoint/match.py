"""Which stored tensor is which of the model's, and everything that does not fit. Pure.

A load that stops at the first wrong name is repeated as often as there are wrong names, and one
that skips what does not fit trains garbage. So all of it is found first, and said at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.checkpoint.dtypes import DTYPES, PACKED
from shardwise.checkpoint.header import Stored
from shardwise.errors import nearest

__all__ = ["Matched", "Wanted", "match"]

NEAREST = 20
"""Missing names for which the nearest stored one is looked up: each costs a comparison with all."""


class Wanted(NamedTuple):
    """A tensor that the model has: all its names, the first first."""

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Matched:
    """What fits, and what does not.

    Attributes:
        pairs: the model's (first) name → the stored one; what is to be read.
        missing: names that are not stored.
        unexpected: stored names that the model does not have.
        misshapen: names stored in another shape.
        foreign: names stored in a dtype that cannot be converted.
        cast: names in ``pairs`` that are stored in another dtype.
        details: a line about each of these, by name.
    """

    pairs: Mapping[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: tuple[str, ...]
    foreign: tuple[str, ...]
    cast: tuple[str, ...]
    details: Mapping[str, str]

    def problems(self, cast: bool) -> list[str]:
        """One line for each thing that does not fit; conversions count unless ``cast``."""
        names = [*self.missing, *self.unexpected, *self.misshapen, *self.foreign]
        return [self.details[name] for name in names + ([] if cast else list(self.cast))]


def match(
    wanted: Sequence[Wanted], stored: Mapping[str, Stored], aliases: Mapping[str, str]
) -> Matched:
    """Find each wanted tensor.

    Args:
        stored: what the files hold, by name.
        aliases: further names that the files' writer knew → the stored name.
    """
    pairs, details = {}, {}
    missing, misshapen, foreign, cast = [], [], [], []
    known: set[str] = set()
    for names, dtype, shape in wanted:
        name = names[0]
        found = _find(names, stored, aliases)
        known.update(names, [] if found is None else [found])
        if found is None:
            missing.append(name)
            continue
        there = stored[found]
        if there.shape != shape:
            misshapen.append(name)
            details[name] = f"{name}: stored as {there.shape}, the model has {shape}"
        elif there.dtype != dtype and not _converts(there.dtype, dtype):
            foreign.append(name)
            details[name] = f"{name}: stored as {there.dtype}, the model has {dtype}"
        else:
            pairs[name] = found
            if there.dtype != dtype:
                cast.append(name)
                details[name] = f"{name}: stored as {there.dtype}, the model has {dtype}"
    unexpected = [name for name in stored if name not in known]
    details |= {name: f"{name}: stored, and the model has no such name" for name in unexpected}
    details |= _missing(missing, unexpected or list(stored))
    return Matched(
        pairs,
        tuple(missing),
        tuple(unexpected),
        tuple(misshapen),
        tuple(foreign),
        tuple(cast),
        details,
    )


def _find(
    names: Iterable[str], stored: Mapping[str, Stored], aliases: Mapping[str, str]
) -> str | None:
    for name in names:
        for candidate in (name, aliases.get(name)):
            if candidate is not None and candidate in stored:
                return candidate
    return None


def _converts(stored: str, wanted: str) -> bool:
    """Can torch? It has no arithmetic on packed elements."""
    known = stored in DTYPES and not {stored, wanted} & set(PACKED)
    return known and DTYPES[stored].is_floating_point and DTYPES[wanted].is_floating_point


def _missing(names: Sequence[str], there: Sequence[str]) -> dict[str, str]:
    details = {name: f"{name}: not stored" for name in names}
    for name in names[:NEAREST]:
        if like := nearest(name, there, 1):
            details[name] += f"; nearest stored is {like[0]}"
    return details
