"""Runs: what touches and is updated alike goes together, within one rank's piece."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from shardwise.optim.update import runs


def drawn(slots: str, keys: str, piece: int) -> str:
    """``slots``: an element each, a letter for each slot, ``.`` is padding. Each run in brackets.

    ``keys``: one for each slot in order; ``-`` is a slot without a gradient.
    """
    names = list(dict.fromkeys(slots.replace(".", "")))
    places = [(slots.index(name), slots.rindex(name) + 1) for name in names]
    found = runs(places, [None if key == "-" else key for key in keys], piece)
    return " ".join(f"[{slots[run.start : run.stop]}]{run.key}" for run in found)


def test_slots_that_touch_and_have_the_same_key_are_one_run() -> None:
    assert drawn("aaabbbc", "111", 7) == "[aaabbbc]1"


def test_another_key_begins_another_run() -> None:
    assert drawn("aaabbbcdd", "1121", 9) == "[aaabbb]1 [c]2 [dd]1"


def test_a_slot_without_a_gradient_is_left_out() -> None:
    assert drawn("aaabbbc", "1-1", 7) == "[aaa]1 [c]1"


def test_padding_is_in_no_run() -> None:
    assert drawn("aa.bbb..", "11", 8) == "[aa]1 [bbb]1"


def test_a_run_ends_with_the_piece_of_a_rank() -> None:
    assert drawn("aaabbbccc", "111", 4) == "[aaab]1 [bbcc]1 [c]1"
    assert drawn("aaaaaaaaa", "1", 3) == "[aaa]1 [aaa]1 [aaa]1"


def test_an_empty_slot_is_in_no_run_and_separates_none() -> None:
    found = runs([(0, 2), (2, 2), (2, 5), (5, 5)], ["x", "y", "x", "x"], 8)
    assert [(run.start, run.stop, run.first) for run in found] == [(0, 5, 0)]
    assert runs([(0, 0)], ["x"], 0) == []  # of a rank that holds nothing


@pytest.mark.parametrize("seed", range(30))
def test_every_element_with_a_key_is_in_one_run_and_no_two_runs_could_be_one(seed: int) -> None:
    choose = random.Random(seed)
    places, keys, at = list[tuple[int, int]](), list[str | None](), 0
    for _ in range(choose.randrange(12)):
        at += choose.choice([0, 0, 0, 1, 3])
        start, at = at, at + choose.choice([0, 1, 2, 5, 9])
        places.append((start, at))
        keys.append(choose.choice(["x", "x", "y", None]))
    piece = choose.randrange(1, 20)
    found = runs(places, keys, piece)
    expected = {
        element: key
        for (start, stop), key in zip(places, keys, strict=True)
        for element in range(start, stop)
        if key is not None
    }
    covered = [(e, run.key) for run in found for e in range(run.start, run.stop)]
    assert dict(covered) == expected
    assert len(covered) == len(expected)
    for run in found:
        assert run.start // piece == (run.stop - 1) // piece
        assert places[run.first][0] <= run.start < places[run.first][1]
    for one, other in pairwise(found):
        assert one.stop < other.start or one.key != other.key or other.start % piece == 0
