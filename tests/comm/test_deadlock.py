"""Rings of ranks that wait for each other in different groups, and what only looks like one."""

from __future__ import annotations

from itertools import product

from shardwise.comm.deadlock import Blocked, deadlock

ROW, OTHER_ROW = "the shard axis [0, 1]", "the shard axis [2, 3]"
COLUMN, OTHER_COLUMN = "the replicate axis [0, 2]", "the replicate axis [1, 3]"


def at(group: str, *peers: int, seq: int = 7, **issued: int) -> Blocked:
    """Waits for ``peers`` at collective ``seq`` of ``group``; of others it has issued 3."""
    counts = {ROW: 3, OTHER_ROW: 3, COLUMN: 3, OTHER_COLUMN: 3, group: seq + 1}
    return Blocked(group, peers, seq, f"gather blocks.{seq}", counts | issued)


RING = {0: at(ROW, 1), 1: at(OTHER_COLUMN, 3), 3: at(OTHER_ROW, 2), 2: at(COLUMN, 0)}


def test_every_rank_of_a_ring_finds_it_and_says_it_in_the_same_words() -> None:
    [said] = {deadlock(rank, RING.get) for rank in RING}
    assert said.startswith(
        "4 ranks, numbered among all, wait for each other: "
        "rank 0 for rank 1 at gather blocks.7 on the shard axis [0, 1]; "
        "rank 1 for rank 3 at gather blocks.7 on the replicate axis [1, 3]; "
        "rank 3 for rank 2 at gather blocks.7 on the shard axis [2, 3]; "
        "rank 2 for rank 0 at gather blocks.7 on the replicate axis [0, 2]. This group cannot"
    )


def test_a_rank_that_waits_for_a_ring_finds_it_too_and_one_that_it_waits_for_does_not() -> None:
    outside = {**RING, 5: at("the group of all", 4, 0), 4: at("the shard axis [4, 5]", 6)}
    assert deadlock(5, outside.get) == deadlock(0, RING.get)
    assert deadlock(4, outside.get) == ""


def test_two_ranks_of_the_same_groups_wait_for_each_other() -> None:
    said = deadlock(1, {0: at(ROW, 1), 1: at("the group of all", 0)}.get)
    assert (
        "rank 0 for rank 1 at gather blocks.7 on the shard axis [0, 1]; rank 1 for rank 0" in said
    )


def test_a_chain_that_ends_at_a_rank_that_computes_is_left_alone() -> None:
    for computes, asks in product(RING, RING):
        chain = {rank: blocked for rank, blocked in RING.items() if rank != computes}
        assert deadlock(asks, chain.get) == ""


def test_what_a_rank_has_published_before_it_went_on_makes_no_ring() -> None:
    """Rank 3 published its wait later, when it had issued what rank 1 once waited for."""
    late = at(OTHER_ROW, 2, **{OTHER_COLUMN: 8})
    for asks in RING:
        assert deadlock(asks, {**RING, 3: late}.get) == ""


def test_a_rank_that_issued_all_before_the_awaited_collective_is_part_of_a_ring() -> None:
    for issued, is_ring in ((7, True), (8, False)):  # collectives 0 to 6, and 7, too
        last = at(OTHER_ROW, 2, **{OTHER_COLUMN: issued})
        assert bool(deadlock(0, {**RING, 3: last}.get)) is is_ring


def test_ranks_at_other_numbers_of_one_group_make_no_ring() -> None:
    assert deadlock(0, {0: at(ROW, 1, seq=7), 1: at(ROW, 0, seq=9)}.get) == ""


def test_a_group_that_a_rank_has_not_opened_yet_is_one_in_which_it_has_issued_nothing() -> None:
    before = at("the group of all", 0)._replace(issued={"the group of all": 8})
    startup = at(ROW, 1, seq=-256)
    assert deadlock(0, {0: startup, 1: before}.get) != ""
