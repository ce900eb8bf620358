"""The bytes of files that this rank has in memory, by their place in the file.

A rank writes the shards that it holds, from where they lie, and the few bytes at the edges of pages
that other ranks sent.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from shardwise.checkpoint.local_shards import LocalShard
from shardwise.checkpoint.plan import FilePlan, Move
from shardwise.checkpoint.safetensors_format import bytes_of, dtype_of
from shardwise.checkpoint.writer import Chunk, copy_pieces
from shardwise.comm.protocol import Comm, Label
from shardwise.plan.layout.layout import cut_at_multiples

ROUND = 16 << 20
"""Bytes of edges that are sent around at once, over all ranks."""


@dataclass
class _Segment:
    start: int
    stop: int
    value: Tensor  # of these bytes, on any device

    @cached_property
    def data(self) -> Tensor:
        """``[stop - start]`` uint8, which whoever writes them makes: a save is planned without."""
        return bytes_of(self.value)


class Segments:
    """The bytes of one file that this rank has."""

    def __init__(self, plan: FilePlan, shards: Mapping[str, LocalShard]) -> None:
        self.plan = plan
        self._segments: list[_Segment] = []
        self.add(_held(plan, shards))

    def add(self, more: Iterable[_Segment]) -> None:
        """Take further bytes, which other ranks sent."""
        self._segments = sorted([*self._segments, *more], key=lambda segment: segment.start)
        self._starts = [segment.start for segment in self._segments]

    def between(self, start: int, stop: int) -> Iterator[Tensor]:
        """The bytes ``[start, stop)`` of the file, in pieces that lie together in memory."""
        at = start
        while at < stop:
            segment = self._segments[bisect_right(self._starts, at) - 1]
            end = min(stop, segment.stop)
            assert segment.start <= at < end, (self.plan.name, at)  # the plan gave us these bytes
            yield segment.data[at - segment.start : end - segment.start]
            at = end


def _held(plan: FilePlan, shards: Mapping[str, LocalShard]) -> Iterator[_Segment]:
    for name, stored in plan.tensors.items():
        shard = shards[name]
        start = stored.start + shard.start * dtype_of(stored.dtype).itemsize
        if nbytes := shard.value.nbytes:
            yield _Segment(start, start + nbytes, shard.value)


def exchange_edges(comm: Comm, files: Sequence[Segments]) -> None:
    """Bring the bytes at page edges to the ranks that write them. A collective."""
    moves = [(number, move) for number, file in enumerate(files) for move in file.plan.moves]
    for some in rounds([move for _, move in moves], comm.size):
        mine, at = moves[some.start : some.stop], [0] * comm.size
        totals = Counter[int]()
        for _, move in mine:
            totals[move.source] += move.stop - move.start
        full = torch.empty(comm.size, max(totals.values()), dtype=torch.uint8, device=comm.device)
        sent: list[Tensor] = []
        received: dict[int, list[_Segment]] = {}  # by the number of the file
        for number, move in mine:
            begin, at[move.source] = at[move.source], at[move.source] + move.stop - move.start
            if move.source == comm.rank:
                sent += (one.to(full) for one in files[number].between(move.start, move.stop))
            if move.writer == comm.rank:
                place = full[move.source, begin : at[move.source]]
                received.setdefault(number, []).append(_Segment(move.start, move.stop, place))
        copy_pieces([torch.cat(sent)] if sent else (), full[comm.rank])
        comm.all_gather(full.view(-1), Label("gather", "edges of pages")).wait()
        for number, segments in received.items():
            # Not what lies in ``full``, or what all ranks sent would stay.
            files[number].add(replace(one, value=one.value.clone()) for one in segments)


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


def gathered(comm: Comm, files: Iterable[Segments]) -> Iterator[Chunk]:
    """All bytes of every file, in order, as they arrive on rank 0; none on others. Collectives.

    They arrive a few megabytes at a time, so no rank holds more of the model than its shard.
    """
    for segments in files:
        plan = segments.plan
        at = len(plan.header)
        for some in rounds(plan.moves, comm.size):
            part = copy.copy(segments)  # which drops the received bytes when they are written
            part.plan = replace(plan, moves=plan.moves[some.start : some.stop])
            exchange_edges(comm, [part])
            stop = part.plan.moves[-1].stop
            yield from _between(part, at, stop) if comm.rank == 0 else ()
            at = stop
        yield from _between(segments, at, plan.size) if comm.rank == 0 else ()


def _between(segments: Segments, start: int, stop: int) -> Iterator[Chunk]:
    for first, last in cut_at_multiples(start, stop, segments.plan.block):
        yield Chunk(segments.plan.name, first, last, tuple(segments.between(first, last)))
