from __future__ import annotations

import pytest

from shardwise.errors import ConfigError
from shardwise.outer.schedule import OuterSchedule


def table(schedule: OuterSchedule, steps: int) -> str:
    lines = []
    for step in range(1, steps + 1):
        events = [f"send {unit}" for unit in schedule.sent(step)]
        events += [f"receive {unit}" for unit in schedule.received(step)]
        lines.append(f"{step}  {', '.join(events)}".rstrip())
    return "\n".join(lines)


def test_units_are_spread_over_the_round_by_their_bytes() -> None:
    schedule = OuterSchedule.spread({"embed": 4, "block": 2, "head": 2}, every=4, delay=1)
    assert table(schedule, 8) == (
        "1\n"
        "2  send embed\n"
        "3  send block, receive embed\n"
        "4  send head, receive block\n"
        "5  receive head\n"
        "6  send embed\n"
        "7  send block, receive embed\n"
        "8  send head, receive block"
    )


def test_without_delay_a_mean_is_received_in_the_step_in_which_the_unit_is_sent() -> None:
    schedule = OuterSchedule.spread({"a": 1, "b": 1}, every=1, delay=None)
    assert schedule.sent(1) == schedule.received(1) == schedule.sent(2) == ["a", "b"]


def test_the_delay_is_an_eighth_of_the_round() -> None:
    assert OuterSchedule.spread({"a": 1}, 500, None).delay == 62


@pytest.mark.parametrize(
    ("every", "delay", "words"), [(0, 0, "at least 1"), (4, 4, "0 to 3"), (4, -1, "0 to 3")]
)
def test_rounds_that_cannot_be_are_refused(every: int, delay: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OuterSchedule.spread({"a": 1}, every, delay)
