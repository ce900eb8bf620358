from __future__ import annotations

import os

import pytest

from benchmarks.crew import Crew, Seat


def speak_twice(seat: Seat, word: str) -> None:
    seat.tell((seat.rank, seat.world))
    seat.tell(word * (seat.rank + 1))


def fail_on_the_second(seat: Seat) -> None:
    if seat.rank == 1:
        raise ValueError("the second rank cannot")
    seat.tell("fine")


def die(seat: Seat) -> None:
    os._exit(3)


@pytest.mark.spawn
def test_what_ranks_tell_is_heard_in_rank_order_message_by_message() -> None:
    with Crew(2, speak_twice, "ab") as crew:
        assert crew.hear() == [(0, 2), (1, 2)]
        assert crew.hear() == ["ab", "abab"]


@pytest.mark.spawn
def test_a_rank_that_raises_is_named_with_its_error() -> None:
    with (
        pytest.raises(RuntimeError, match=r"rank 1 raised:\n(.*\n)*ValueError: the second rank"),
        Crew(2, fail_on_the_second) as crew,
    ):
        crew.hear()


@pytest.mark.spawn
def test_a_rank_that_dies_is_not_waited_for() -> None:
    with pytest.raises(RuntimeError, match="rank 0 died without a word"), Crew(1, die) as crew:
        crew.hear()
