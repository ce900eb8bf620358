from __future__ import annotations

from shardwise.outer.tally import Key, Tally

A0, A1 = Key("a", 0), Key("a", 1)


def tally(*present: int) -> Tally:
    of = Tally(0)
    of.present.update(present)
    return of


def test_a_mean_is_due_when_every_worker_that_is_present_has_sent_its_part() -> None:
    of = tally(1, 2)
    of.add(2, A0, b"2")
    of.add(0, A0, b"0")
    assert of.take() == []
    assert of.missing(A0) == [1]
    of.add(1, A0, b"1")
    assert of.take() == [(A0, [b"0", b"1", b"2"])]  # in the order of workers
    assert of.take() == []


def test_a_lost_worker_is_awaited_no_more_and_what_it_sent_counts() -> None:
    of = tally(1, 2)
    of.add(0, A0, b"0")
    of.add(1, A0, b"1")
    of.drop(1)
    of.drop(2)
    assert of.take() == [(A0, [b"0", b"1"])]
    of.add(0, A1, b"0")
    assert of.take() == [(A1, [b"0"])]


def test_a_worker_that_comes_is_awaited_from_the_next_mean_on() -> None:
    of = tally()
    of.add(0, A0, b"0")
    of.present.add(1)
    assert of.take() == [(A0, [b"0"])]
    of.add(0, A1, b"0")
    assert of.take() == []
    assert of.missing(A1) == [1]


def test_a_mean_awaits_the_leaders_part_and_all_that_were_present_then() -> None:
    of = tally()
    of.add(1, A0, b"1")  # it comes before the word that it is ready
    assert of.take() == []
    of.present.update((1, 2))
    of.add(0, A0, b"0")
    of.present.add(3)
    assert of.missing(A0) == [2]
    of.add(2, A0, b"2")
    assert of.take() == [(A0, [b"0", b"1", b"2"])]


def test_a_part_of_a_mean_that_was_formed_counts_no_more() -> None:
    of = tally()
    of.add(0, A0, b"0")
    of.take()
    of.add(1, A0, b"late")
    assert of.take() == []


def test_a_mean_that_the_leader_before_has_formed_is_not_formed_again() -> None:
    of = Tally(0, formed=[A0, A1])
    of.add(0, A0, b"0")
    of.add(0, A1, b"0")
    assert of.take() == []
    of.add(0, Key("a", 2), b"0")
    assert of.take() == [(Key("a", 2), [b"0"])]


def test_a_unit_without_a_name_has_one_in_messages() -> None:
    assert f"its part of {Key('', 3)}, of {Key('blocks.0', 3)}" == "its part of (root), of blocks.0"
