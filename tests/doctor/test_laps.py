"""Laps: each counts until its slowest rank is done, and the median of the rounds is of all."""

from __future__ import annotations

from time import sleep

from shardwise.comm.protocol import Comm
from shardwise.doctor.laps import Measured, medians
from tests.ranks import run_threads


def test_seconds_are_those_of_the_slowest_rank() -> None:
    def rank(comm: Comm) -> dict[str, float]:
        measured = {"nap": Measured(lambda: sleep(0.01 * (1 + comm.rank)), per=2)}
        return medians(comm, measured, rounds=3)

    first, second = run_threads(2, rank)
    assert first == second
    assert 0.01 <= first["nap"] < 0.1
