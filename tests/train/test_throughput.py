from __future__ import annotations

import mmap
from collections.abc import Iterable

import pytest

from shardwise.train.throughput import Throughput, resident_bytes


def metered(durations: Iterable[float], warmup: int = 3) -> Throughput:
    """A meter whose steps took this long by its clock, with ten seconds between them."""
    now = 0.0

    def clock() -> float:
        return now

    meter = Throughput(warmup, clock)
    for duration in durations:
        with meter.step():
            now += duration
        meter.count(100)
        now += 10.0
    return meter


def test_slow_first_steps_do_not_count() -> None:
    meter = metered([60.0, 30.0, 9.0, 2.0, 2.0])
    assert meter.tokens_per_second == 50.0
    assert meter.seconds_per_step == 2.0


@pytest.mark.parametrize(("warmup", "speed"), [(0, 4 * 100 / 16), (1, 3 * 100 / 7), (3, 100 / 2)])
def test_as_many_first_steps_as_asked_do_not_count_in_the_whole(warmup: int, speed: float) -> None:
    meter = metered([9.0, 3.0, 2.0, 2.0], warmup)
    assert meter.overall == meter.tokens_per_second == speed


def test_the_whole_is_all_steps_and_not_only_recent_ones() -> None:
    meter = metered([50.0] * 3 + [1.0] * 30 + [3.0] * 20)
    assert meter.overall == 50 * 100 / 90
    assert metered([]).overall == 0.0


def test_until_there_are_others_the_first_steps_are_all_there_is() -> None:
    assert metered([4.0, 6.0]).seconds_per_step == 5.0
    assert metered([4.0, 6.0]).tokens_per_second == 20.0


def test_what_lies_between_steps_does_not_count() -> None:
    assert metered([1.0] * 5).tokens_per_second == 100.0


def test_a_slowdown_shows_within_twenty_steps() -> None:
    meter = metered([1.0] * 1000 + [4.0] * 20)
    assert meter.tokens_per_second == 25.0
    assert meter.seconds_per_step == 4.0


def test_the_time_that_is_left_counts_validations_and_saves_as_often_as_they_come() -> None:
    now = 0.0
    meter = Throughput(1, lambda: now)

    def step(seconds: float) -> None:
        nonlocal now
        with meter.step():
            now += seconds
        meter.count(100)

    step(50.0)
    assert meter.seconds_left(10, {}) is None  # the first step says nothing of the others
    assert meter.seconds_left(0, {"saving": 1}) == 0.0
    step(2.0)
    assert meter.seconds_left(10, {"validation": 2}) == 20.0  # none has been timed
    for seconds in (4.0, 6.0):
        with meter.between_steps("validation"):
            now += seconds
    assert meter.seconds_left(10, {"validation": 2, "saving": 3}) == 20.0 + 2 * 5.0


def test_a_step_costs_the_same_however_many_there_were() -> None:
    meter = metered([1.0] * 1000)
    assert len(meter._recent) == 20


def test_a_meter_that_saw_nothing_says_zero() -> None:
    assert (metered([]).tokens_per_second, metered([]).seconds_per_step) == (0.0, 0.0)


def test_memory_grows_with_what_is_held() -> None:
    before = resident_bytes()
    with mmap.mmap(-1, 64 * 2**20) as held:  # pages of its own, whatever the heap has at hand
        for _ in range(64):  # in pieces: malloc may keep the memory of a whole copy
            held.write(b"x" * 2**20)
        assert resident_bytes() - before == pytest.approx(len(held), rel=0.1)
