"""The bytes of files that this rank has at hand, and where in memory each of them is.

A rank writes what it holds (shards, in place) and the few bytes at the edges of pages that came
from others. Both are found by their place in the file.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from shardwise.checkpoint.local_shards import LocalShard
from shardwise.checkpoint.plan import FilePlan, Move, cut_at_blocks
from shardwise.checkpoint.safetensors_format import itemsize
from shardwise.checkpoint.writer import Chunk
from shardwise.comm.protocol import Comm, Label

ROUND = 16 << 20
"""Bytes of edges that are sent around at once, over all ranks."""


class _Segment(NamedTuple):
    start: int
    stop: int
    data: Tensor  # [stop - start] uint8, on any device


class Segments:
    """The bytes of one file that are here."""

    def __init__(self, plan: FilePlan, holdings: Mapping[str, LocalShard]) -> None:
        self.plan = plan
        self._segments: list[_Segment] = []
        self._add(_held(plan, holdings))

    def add(self, moves: Iterable[tuple[Move, Tensor]]) -> None:
        """Take bytes that came from others."""
        self._add(_Segment(move.start, move.stop, data) for move, data in moves)

    def _add(self, more: Iterable[_Segment]) -> None:
        self._segments = sorted([*self._segments, *more], key=lambda segment: segment.start)
        self._starts = [segment.start for segment in self._segments]

    def with_moves(self, moves: Sequence[Move]) -> Self:
        """The same file, of which only these moves are asked for; what they bring stays in it."""
        other = copy.copy(self)
        other.plan = replace(self.plan, moves=tuple(moves))
        return other

    def between(self, start: int, stop: int) -> Iterator[Tensor]:
        """The bytes ``[start, stop)`` of the file, in pieces that lie together in memory."""
        at = start
        while at < stop:
            segment = self._segments[bisect_right(self._starts, at) - 1]
            end = min(stop, segment.stop)
            assert segment.start <= at < end, (self.plan.name, at)  # the plan gave us these bytes
            yield segment.data[at - segment.start : end - segment.start]
            at = end


def _held(plan: FilePlan, holdings: Mapping[str, LocalShard]) -> Iterator[_Segment]:
    for name, stored in plan.tensors.items():
        holding = holdings[name]
        start = stored.start + holding.start * itemsize(stored.dtype)
        if holding.value.numel():
            data = holding.data
            yield _Segment(start, start + len(data), data)


def exchange_edges(comm: Comm, files: Sequence[Segments]) -> None:
    """Bring the bytes at page edges to the ranks that write them. A collective."""
    moves = [(number, move) for number, file in enumerate(files) for move in file.plan.moves]
    for some in rounds([move for _, move in moves], comm.size):
        mine, at = moves[some.start : some.stop], [0] * comm.size
        width = max(_totals([move for _, move in mine], comm.size))
        full = torch.empty(comm.size, width, dtype=torch.uint8, device=comm.device)
        places = []
        for number, move in mine:
            length = move.stop - move.start
            place = full[move.source, at[move.source] : at[move.source] + length]
            at[move.source] += length
            places.append(place)
            if move.source == comm.rank:
                _gather_into(place, files[number].between(move.start, move.stop))
        comm.all_gather(full.view(-1), Label("gather", "edges of pages")).wait()
        for number, file in enumerate(files):
            file.add(
                (move, place.clone())
                for (owner, move), place in zip(mine, places, strict=True)
                if owner == number and move.writer == comm.rank
            )


def _gather_into(place: Tensor, pieces: Iterable[Tensor]) -> None:
    at = 0
    for piece in pieces:
        place[at : at + len(piece)].copy_(piece)
        at += len(piece)


def rounds(moves: Sequence[Move], world: int, most: int = ROUND) -> Iterator[range]:
    """Cut the list of moves so that no round sends more than ``most`` bytes around. Pure."""
    first, totals, longest = 0, [0] * world, 0
    for k, (start, stop, source, _) in enumerate(moves):
        total = totals[source] + stop - start
        if k > first and world * max(longest, total) > most:
            yield range(first, k)
            first, totals, longest, total = k, [0] * world, 0, stop - start
        totals[source] = total
        longest = max(longest, total)
    if first < len(moves):
        yield range(first, len(moves))


def _totals(moves: Iterable[Move], world: int) -> list[int]:
    totals = [0] * world
    for move in moves:
        totals[move.source] += move.stop - move.start
    return totals


def gathered(comm: Comm, files: Iterable[Segments]) -> Iterator[Chunk]:
    """All bytes of every file, in order, as they arrive on rank 0; none on others. Collectives.

    They arrive a few megabytes at a time, so no rank holds more of the model than its shard.
    """
    for segments in files:
        plan = segments.plan
        at = len(plan.header)
        for some in rounds(plan.moves, comm.size):
            part = segments.with_moves(plan.moves[some.start : some.stop])
            exchange_edges(comm, [part])
            stop = part.plan.moves[-1].stop
            yield from _between(part, at, stop) if comm.rank == 0 else ()
            at = stop
        yield from _between(segments, at, plan.size) if comm.rank == 0 else ()


def _between(segments: Segments, start: int, stop: int) -> Iterator[Chunk]:
    for first, last in cut_at_blocks(start, stop, segments.plan.block):
        yield Chunk(segments.plan.name, first, last, tuple(segments.between(first, last)))
