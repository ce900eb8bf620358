"""A search for the fastest candidates that fit: what cannot be among them is not looked at.

A candidate waits under a number of seconds that it cannot be faster than. The least of all is
looked at more closely, and waits again; one whose seconds are its estimate is the next fastest.

    seconds at least        known when
    of computing            the model was observed
    of the link, too        the model was cut as the strategy does
    estimate                its memory fits, and the step was played on both lanes
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from shardwise.config.strategies import placement_of
from shardwise.plan.forecast.candidate import OFFLOADS, Candidate
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

    Those with more in host memory than one that fits are left out: the copies only take time.

    Args:
        fits: do so many bytes at most fit?
    """
    look: tuple[Callable[[Candidate], float], ...]
    look = planner.computed, planner.least, planner.seconds
    rows = planner.question.rows_of
    possible = dict.fromkeys(_possible(planner, candidates, fits))
    waiting = [_Waiting(look[0](c) / rows(c), n, 0, c) for n, c in enumerate(possible)]
    heapify(waiting)
    while waiting:
        seconds, number, known, candidate = heappop(waiting)
        if known == len(look) - 1:
            yield Estimate(candidate, seconds)
        elif not known or _fits_only_so(planner, candidate, possible, fits):
            seconds = look[known + 1](candidate) / rows(candidate)
            heappush(waiting, _Waiting(seconds, number, known + 1, candidate))


def _fits_only_so(
    planner: Planner, candidate: Candidate, among: Container[Candidate], fits: Fits
) -> bool:
    """Does it fit, and none of ``among`` that differs in having less in host memory?"""
    less = OFFLOADS[: OFFLOADS.index(candidate.offload)]
    others = (replace(candidate, offload=offload) for offload in less)
    if any(fits(planner.peak(other)) for other in others if other in among):
        return False
    return fits(planner.peak(candidate))


def _possible(planner: Planner, candidates: Iterable[Candidate], fits: Fits) -> Iterator[Candidate]:
    """Leave out those whose activations alone do not fit: more rows are not observed then.

    And those that have every unit gathered at once, where that alone does not fit.
    """
    too_many: dict[int, int] = {}  # rows, by what is recomputed
    holds_whole = fits(Peak(planner.question.gathered, 0))
    for candidate in sorted(candidates, key=_size):
        if not (holds_whole or placement_of(candidate.strategy).frees):
            continue
        rows, recompute = candidate.micro_batch, candidate.recompute
        if rows >= too_many.get(recompute, rows + 1):
            continue
        if fits(Peak(planner.activations(candidate), 0)):
            yield candidate
        else:
            too_many[recompute] = rows


def smallest(
    planner: Planner, candidates: Iterable[Candidate], filled: Callable[[Peak], float]
) -> Candidate:
    """Return what takes least memory, by estimates.

    Args:
        filled: the part of memory that so many bytes fill.
    """
    least: dict[tuple[object, ...], Candidate] = {}  # rows and units ahead take more, always
    for candidate in candidates:
        c = candidate
        alike = c.strategy, c.mesh, c.recompute, c.offload, c.wire
        least[alike] = min(least.get(alike, c), c, key=_size)
    return min(least.values(), key=lambda c: (filled(planner.peak(c)), planner.peak(c)))


def _size(candidate: Candidate) -> tuple[float, ...]:
    return candidate.micro_batch, candidate.prefetch, candidate.unsharded
