from __future__ import annotations

import shardwise as sw
from shardwise.comm.protocol import Comm, Label
from shardwise.train import slow_ranks
from shardwise.train.slow_ranks import SlowRanks, seconds_waited
from tests.nets import decoder
from tests.ranks import run_threads


def reports(steps: int, seconds: float, *waited: float) -> list[str]:
    """The reports of a run whose ranks wait so long in each step; a step takes ``seconds``."""
    now = [0.0]
    slow = SlowRanks(lambda: 0.0, lambda: now[0])
    texts = []
    for _ in range(steps):
        slow.begin()
        now[0] += seconds
        texts.append(slow.end(waited))
        now[0] += 100.0  # validation, which does not count
    return [text for text in texts if text]


def test_the_rank_that_waits_least_is_slow_and_costs_what_the_next_one_waits_more() -> None:
    (text,) = reports(slow_ranks.FIRST + 21, 1.0, 0.5, 0.4, 0.1, 0.6)
    assert text.startswith("rank 2 is slow: the others waited 30% of the last 20 steps (20 s) for")


def test_less_than_a_tenth_is_not_reported_nor_is_one_rank_alone() -> None:
    assert reports(100, 1.0, 0.59, 0.5) == []
    assert reports(100, 1.0, 0.0) == []


def test_a_rank_is_not_reported_again_until_it_costs_half_as_much_again() -> None:
    assert len(reports(200, 1.0, 0.5, 0.2)) == 1


def test_short_steps_are_reported_after_ten_seconds() -> None:
    assert reports(100, 0.01, 0.0, 0.005) == []
    (text,) = reports(400, 0.05, 0.0, 0.03)
    assert "60% of the last 2" in text


def test_what_a_step_has_waited_is_exchanged_in_the_next_one() -> None:
    waited = [2.0]
    slow = SlowRanks(lambda: waited[0])
    slow.begin()
    waited[0] = 5.0
    slow.end([0.0])
    assert slow.last == 3.0


def test_waiting_for_other_workers_is_no_rank_s_fault() -> None:
    waited, now = [0.0], [0.0]
    slow = SlowRanks(lambda: waited[0], lambda: now[0])

    def exchange() -> str:
        waited[0] += 50.0
        now[0] += 60.0
        return "exchanged"

    texts = []
    for _ in range(30):
        slow.begin()
        now[0] += 1.0
        assert slow.without(exchange) == "exchanged"
        texts.append(slow.end([0.0, 0.3]))
    assert slow.last == 0.0
    assert any("waited 30% of the last 20 steps (20 s)" in text for text in texts)


def test_a_hybrid_waits_on_both_axes() -> None:
    def rank(comm: Comm) -> bool:
        sharded = sw.shard(decoder(), "hybrid_shard", comm=comm, mesh=(2, 2))
        before = seconds_waited(sharded)
        for axis in comm.axes(2, 2):
            axis.counters.waited(Label("gather").op, 10.0)
        return seconds_waited(sharded) - before >= 20.0

    assert run_threads(4, rank) == [True] * 4
