"""The moments at which a wait is logged."""

from __future__ import annotations

from time import monotonic

from shardwise.comm.watchdog.waited import Waited


def test_a_wait_is_said_after_five_seconds_and_each_time_that_it_has_doubled() -> None:
    ages = (1, 4, 6, 9, 11, 12, 100, 150, 161)
    waited, reported = Waited(), list[int]()
    for age in ages:
        waited.since = monotonic() - age
        reported += [age] * waited.is_due()
    assert reported == [6, 11, 100, 161]
