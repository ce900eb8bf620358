"""A search for the fastest candidates that fit: what cannot be among them is not looked at.

A candidate waits under a number of seconds that it cannot be faster than. The least of all is
looked at more closely, and waits again; one whose seconds are its estimate is the next fastest.

    seconds at least        known when
    of computing            the model was observed
    of the link, too        the model was cut as the strategy does, and its memory fits
    estimate                the step was played on both lanes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from shardwise.plan.forecast.candidate import Candidate
from shardwise.plan.forecast.planner import Peak, Planner

Fits = Callable[[Peak], bool]


class Estimate(NamedTuple):
    """A candidate that fits, and seconds of a step: for a row where no number of rows is asked."""

    candidate: Candidate
    seconds: float


class _Waiting(NamedTuple):
    """A candidate; of equal ones the first comes first."""

    seconds: float  # for a row
    number: int
    known: int  # how closely it was looked at
    candidate: Candidate


def fastest(planner: Planner, candidates: Iterable[Candidate], fits: Fits) -> Iterator[Estimate]:
    """Yield the candidates that fit, the fastest first, by their estimates.

    Args:
        fits: do so many bytes at most fit?
    """
    look: tuple[Callable[[Candidate], float], ...]
    look = planner.computed, planner.least, planner.seconds
    rows = planner.question.rows_of
    possible = enumerate(_possible(planner, candidates, fits))
    waiting = [_Waiting(look[0](c) / rows(c), n, 0, c) for n, c in possible]
    heapify(waiting)
    while waiting:
        seconds, number, known, candidate = heappop(waiting)
        if known == len(look) - 1:
            yield Estimate(candidate, seconds)
        elif known or fits(planner.peak(candidate)):
            seconds = look[known + 1](candidate) / rows(candidate)
            heappush(waiting, _Waiting(seconds, number, known + 1, candidate))


def _possible(planner: Planner, candidates: Iterable[Candidate], fits: Fits) -> Iterator[Candidate]:
    """Leave out those whose activations alone do not fit: more rows are not observed then."""
    too_many: dict[int, int] = {}  # rows, by what is recomputed
    for candidate in sorted(candidates, key=_size):
        rows, recompute = candidate.micro_batch, candidate.recompute
        if rows >= too_many.get(recompute, rows + 1):
            continue
        if fits(Peak(planner.activations(candidate), 0)):
            yield candidate
        else:
            too_many[recompute] = rows


def smallest(planner: Planner, candidates: Iterable[Candidate]) -> Candidate:
    """Return what takes least memory, by estimates."""
    least: dict[tuple[object, ...], Candidate] = {}  # rows and units ahead take more, always
    for candidate in candidates:
        c = candidate
        alike = c.strategy, c.mesh, c.recompute, c.offload, c.wire
        least[alike] = min(least.get(alike, c), c, key=_size)
    return min(least.values(), key=planner.peak)


def _size(candidate: Candidate) -> tuple[float, ...]:
    return candidate.micro_batch, candidate.prefetch, candidate.unsharded
