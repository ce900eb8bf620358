from __future__ import annotations

import pytest

from shardwise.plan.forecast.passes import passes_of

ONCE = {1: "train", 2: "accumulate last", 3: "accumulate between last",
        5: "accumulate between between between last"}  # fmt: skip


def modes(micro_batches: int, each: bool = False) -> list[str]:
    listed = passes_of(micro_batches, each)
    return [mode for mode, times, _ in listed for _ in range(times)]


@pytest.mark.parametrize("micro_batches", ONCE)
def test_gradients_are_reduced_in_the_last_pass(micro_batches: int) -> None:
    assert modes(micro_batches) == ONCE[micro_batches].split()
    assert {passes.reduced for passes in passes_of(micro_batches)} == {0}


@pytest.mark.parametrize("micro_batches", ONCE)
def test_or_in_each_which_adds_to_those_before(micro_batches: int) -> None:
    assert modes(micro_batches, each=True) == ["train"] * micro_batches
    before = [passes.reduced for passes in passes_of(micro_batches, each=True)]
    assert before == [0, 1, 2][:micro_batches]
