"""Ranks that wait for each other in different groups, which no group sees by itself.

rank 0 ── shard axis ──▶ rank 1 ── replicate axis ──▶ rank 3    An arrow points at the rank that
   ▲                                                     │      has not issued the collective
   └── replicate axis ── rank 2 ◀─────── shard axis ─────┘      for which the other rank waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from math import inf
from typing import NamedTuple

from shardwise.comm.desync import UNUSABLE


class Blocked(NamedTuple):
    """What a rank waits for, as it published it. Ranks are numbered among all."""

    group: str
    peers: Sequence[int]  # it waits until they have issued the collective ``seq`` of the group
    seq: int
    details: str  # of the collective
    issued: Mapping[str, int]  # by group, how many collectives the rank itself has issued


def deadlock(rank: int, read: Callable[[int], Blocked | None]) -> str:
    """Why ``rank`` waits for ever, or ``""``; ``read`` returns what a rank has published last.

    A ring has no end, however old its parts are. The first wait in it to end would need the next
    rank to issue more than it had when it published; but then it was waiting, so its own wait
    would have ended before.
    """
    blocked: dict[int, Blocked] = {}
    reached = [rank]
    for one in reached:
        if one not in blocked and (published := read(one)) is not None:
            blocked[one] = published
            reached += published.peers
    try:
        TopologicalSorter({one: _waits_for(one, blocked) for one in blocked}).prepare()
    except CycleError as error:
        ring = error.args[1][:0:-1]  # each waits for the next
        first = ring.index(min(ring))
        return _describe(ring[first:] + ring[:first], blocked)
    return ""


def _waits_for(rank: int, blocked: Mapping[int, Blocked]) -> list[int]:
    group, peers, seq, _, _ = blocked[rank]
    return [p for p in peers if p in blocked and blocked[p].issued.get(group, -inf) <= seq]


def _describe(ring: Sequence[int], blocked: Mapping[int, Blocked]) -> str:
    waits = [
        f"rank {one} for rank {after} at {blocked[one].details} on {blocked[one].group}"
        for one, after in zip(ring, [*ring[1:], ring[0]], strict=True)
    ]
    return (
        f"{len(ring)} ranks, numbered among all, wait for each other: {'; '.join(waits)}. "
        f"{UNUSABLE} Every rank must run the same modules in the same order: look for a branch, a "
        "loop or a size that depends on the rank."
    )
