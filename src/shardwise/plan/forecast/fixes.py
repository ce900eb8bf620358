"""Fixes of what does not fit: what would, or how near it comes, each of them computed.

A series holds the same change by more and more; the least of it that fits is its fix, or the most:

    ranks      1 host ─ 2 hosts ─ 3 hosts ─ … ─ 1,024 ranks
    shorter    15/16 of a row ─ 14/16 ─ … ─ 1/16
    adapters   a rank of 16
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from shardwise.config.strategies import placement_of
from shardwise.errors import ShardwiseError
from shardwise.plan.forecast.candidate import OFFLOADS, Candidate, savings
from shardwise.plan.forecast.planner import Forecast, Planner
from shardwise.plan.forecast.question import Inputs, Question
from shardwise.plan.forecast.verdict import Errors, Fix

MOST_RANKS = 1024  # that are looked at
PARTS = 16  # of a row's length: the longest that fits, to so many parts
Change = tuple[str, Callable[[], Question]]
Series = Sequence[Change]


class _Tried(NamedTuple):
    """A forecast of what was changed; ``filled``: the part of memory that it fills."""

    forecast: Forecast
    filled: float


class Fixes:
    """Fixes of one verdict.

    Args:
        planner: of its question.
        best: its forecast.
        errors: of forecasts.
        searched: it was found, so offload may be as fits another question.
    """

    def __init__(self, planner: Planner, best: Forecast, errors: Errors, searched: bool) -> None:
        self._planner, self._best, self._errors = planner, best, errors
        self._searched = searched

    def ranked(self, further: Iterable[Series]) -> list[Fix]:
        """Fixes that take less memory: those that fit, the fastest first; then the nearest.

        Args:
            further: series beside other candidates and more ranks.
        """
        question, best = self._planner.question, self._best
        tried = [
            (name, self._whole(self._planner, other))
            for name, other in _settings(question, best.candidate)
        ]
        for series in (list(_more_ranks(question, best.candidate)), *further):
            tried += self._least(series)
        least = best.memory.filled(question.machine, question.ranks)
        tried = [(name, each) for name, each in tried if each.filled < least]
        return [self._fix(name, each) for name, each in sorted(tried, key=self._rank)]

    def _rank(self, tried: tuple[str, _Tried]) -> tuple[bool, float]:
        (forecast, filled), fits = tried[1], self._errors.fits(tried[1].filled)
        return not fits, -forecast.time.tokens_per_second if fits else filled

    def _fix(self, name: str, tried: _Tried) -> Fix:
        forecast, own = tried.forecast, self._planner.question.machine.accelerator
        time = self._best.time.tokens_per_second / forecast.time.tokens_per_second
        held, beside = forecast.memory.held(own), own.beside(forecast.memory.in_host)
        return Fix(name, held, beside, time, self._errors.fits(tried.filled))

    def _least(self, series: Series) -> Iterator[tuple[str, _Tried]]:
        """The first of ``series`` that fits, or its last; none where a model cannot be so."""
        made: dict[int, tuple[Planner, Candidate]] = {}

        def fits(number: int) -> bool:
            planner, candidate = made[number] = self._likely(series[number][1]())
            return self._errors.fits(_estimate(planner, candidate))

        if not series:
            return
        try:
            number = min(bisect_left(range(len(series)), True, key=fits), len(series) - 1)
            yield series[number][0], self._whole(*made[number])
        except ShardwiseError:
            return

    def _likely(self, question: Question) -> tuple[Planner, Candidate]:
        """The fastest that fits of candidates that differ in what is offloaded, or the smallest."""
        planner, candidate = self._planner.about(question), self._best.candidate
        offloads = OFFLOADS if self._searched and placement_of(candidate.strategy).splits else ()
        among = [replace(candidate, offload=each) for each in offloads] or [candidate]
        filled = {each: _estimate(planner, each) for each in among}
        fit = [each for each, part in filled.items() if self._errors.fits(part)]
        if fit:
            return planner, min(fit, key=planner.seconds)
        return planner, min(filled, key=lambda each: filled[each])

    def _whole(self, planner: Planner, candidate: Candidate) -> _Tried:
        forecast, question = planner.forecast(candidate), planner.question
        return _Tried(forecast, forecast.memory.filled(question.machine, question.ranks))


def _estimate(planner: Planner, candidate: Candidate) -> float:
    question = planner.question
    return question.machine.filled(*planner.peak(candidate), question.ranks)


def _settings(question: Question, chosen: Candidate) -> Iterator[tuple[str, Candidate]]:
    yield from savings(chosen)
    if question.dtypes.param is torch.float32:
        yield "compute in bfloat16", replace(chosen, computes="bfloat16")


def _more_ranks(question: Question, chosen: Candidate) -> Iterator[Change]:
    """First of one host, up to as many as a usual one has, then whole hosts."""
    if chosen.mesh:
        return
    machine, ranks, sizes = question.machine, question.ranks, list[tuple[int, int]]()
    per_host = machine.per_host
    while ranks <= per_host and 2 * per_host <= machine.accelerator.per_host:
        per_host *= 2
        sizes.append((per_host, per_host))
    first = ranks // per_host + 1
    sizes += [(n * per_host, per_host) for n in range(first, MOST_RANKS // per_host + 1)]
    for ranks, per_host in sizes:
        if not question.rows or question.rows % (ranks * chosen.micro_batch) == 0:
            host = replace(machine, per_host=per_host)
            name = f"{ranks:,} ranks, {per_host:,} a host"
            yield name, partial(replace, question, machine=host, ranks=ranks)


def shorter(question: Question, length: int, tokens_asked: bool = False) -> Series:
    """Return rows of fewer tokens, as many; the model takes one tensor ``[rows, length]``.

    Args:
        tokens_asked: ``--global-batch`` says how many a step has, so a fix has to say it, too.
    """

    def named(n: int) -> str:
        batch = f" --global-batch {(question.rows or 0) * n}" if tokens_asked else ""
        return f"rows of {n:,}: --seq {n}{batch}"

    lengths = [length * part // PARTS for part in range(PARTS - 1, 0, -1)]
    return [(named(n), partial(_cut, question, n)) for n in lengths if n]


def _cut(question: Question, length: int) -> Question:
    def inputs(rows: int) -> Inputs:
        (ids, *rest), options = question.inputs(rows)
        return (ids[:, :length], *rest), options

    return replace(question, inputs=inputs)
