"""A rank's bytes are found by their place in the file; only page edges travel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.local_shards import LocalShard
from shardwise.checkpoint.plan import Entry, FilePlan, Held, Move, plan_files
from shardwise.checkpoint.safetensors_format import PAGE
from shardwise.checkpoint.segments import Segments, exchange_edges, rounds
from shardwise.comm.protocol import Comm
from tests.ranks import run_threads

NUMEL = 9000


def planned(world: int) -> FilePlan:
    """Two tensors, cut at odd places, and one of rank 0's alone."""
    cuts = [NUMEL * r * r // world**2 for r in range(world + 1)]
    ranges = tuple(Held(cuts[r], cuts[r + 1], (r,)) for r in range(world))
    entries = [
        Entry("a", "F32", (NUMEL,), ranges),
        Entry("b", "U8", (NUMEL,), ranges),
        Entry("c", "U8", (5,), (Held(0, 5, (0,)),)),
    ]
    return plan_files("model", entries, 1 << 40)[0]


WHOLE = {
    "a": torch.arange(NUMEL, dtype=torch.float32),
    "b": (torch.arange(NUMEL) % 251).to(torch.uint8),
    "c": torch.arange(5, dtype=torch.uint8),
}


def here(plan: FilePlan, rank: int, world: int) -> Segments:
    lo, hi = (NUMEL * r * r // world**2 for r in (rank, rank + 1))
    entry = Entry("", "U8", (), ())
    holdings = {name: LocalShard(entry, WHOLE[name][lo:hi], lo) for name in ("a", "b")}
    mine = WHOLE["c"] if rank == 0 else WHOLE["c"][:0]
    return Segments(plan, {**holdings, "c": LocalShard(entry, mine, 0)})


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_after_the_exchange_every_rank_has_what_it_writes(world: int) -> None:
    plan = planned(world)
    truth = torch.cat([WHOLE[name].view(torch.uint8) for name in plan.tensors])

    def rank(comm: Comm) -> int:
        segments = here(plan, comm.rank, world)
        exchange_edges(comm, [segments])
        nbytes = 0
        for start, stop in plan.chunks(comm.rank):
            chunk = torch.cat(list(segments.between(start, stop)))
            assert torch.equal(chunk, truth[start - len(plan.header) : stop - len(plan.header)])
            nbytes += len(chunk)
        return nbytes

    assert sum(run_threads(world, rank)) == len(truth)


MOVES = st.lists(st.tuples(st.integers(1, PAGE), st.integers(0, 3)), max_size=40).map(
    lambda drawn: [Move(0, length, source, 0) for length, source in drawn]
)


@given(MOVES, st.integers(PAGE * 4, PAGE * 40))
def test_rounds_are_bounded_and_leave_nothing_out(moves: list[Move], most: int) -> None:
    in_rounds = list(rounds(moves, 4, most))
    assert [k for one_round in in_rounds for k in one_round] == list(range(len(moves)))
    for one_round in in_rounds:
        totals = [0] * 4
        for k in one_round:
            totals[moves[k].source] += moves[k].stop
        assert 4 * max(totals) <= most
