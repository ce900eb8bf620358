from __future__ import annotations

import os

import pytest

from benchmarks.harness.workers import Worker, Workers

pytestmark = pytest.mark.spawn


def send_twice(worker: Worker, word: str) -> None:
    worker.send((worker.rank, worker.world))
    worker.send(word * (worker.rank + 1))
    if worker.rank == 1:
        raise ValueError("the second rank cannot")
    worker.send("done")


def die(worker: Worker) -> None:
    os._exit(3)


def test_what_ranks_send_is_received_in_rank_order_and_an_error_with_its_rank() -> None:
    with Workers(2, send_twice, "ab") as workers:
        assert workers.receive() == [(0, 2), (1, 2)]
        assert workers.receive() == ["ab", "abab"]
        with pytest.raises(RuntimeError, match=r"rank 1 raised:\n(.*\n)*ValueError: the second"):
            workers.receive()


def test_a_rank_that_dies_is_not_waited_for() -> None:
    with pytest.raises(RuntimeError, match="rank 0 died"), Workers(1, die) as workers:
        workers.receive()
