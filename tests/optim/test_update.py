"""A step decided beforehand: how few calls it is, of which runs, and when it is another one."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.optim.flat_state import STEP, FlatState
from shardwise.optim.update import Key, Update, decide, runs
from tests import nets
from tests.fake import FakeComm

NAMES = [(STEP, "moment"), ()]
OLD, NEW, OTHER, OLDER = Key(0, False, 3), Key(0, True, 0), Key(1, False, 3), Key(0, False, 4)


def held_at(world: int, strategy: str = "full_shard", rank: int = 0) -> list[FlatState]:
    torch.manual_seed(0)
    sharded = sw.shard(nets.decoder(), strategy, comm=FakeComm(rank, world))
    every = {id(param): 0 for param in sharded.model.parameters()}
    return [FlatState(bucket, every) for bucket in sharded.buckets]


def keyed(held: list[FlatState], *keys: Key | None) -> Update:
    """Every slot has the first key, but the first of ``held[1]`` have the others."""
    every = [[keys[0]] * len(one.params) for one in held]
    for number, key in enumerate(keys[1:]):
        every[1][held[1].solid[number]] = key
    return decide(held, every, NAMES)


def elements(update: Update) -> int:
    return sum(param.numel() for call in update.calls for param in call.params)


def test_a_step_in_which_all_is_alike_is_one_call() -> None:
    held = held_at(1)
    update = keyed(held, OLD)
    (call,) = update.calls
    used = sum(one.bucket.layout.used for one in held)
    assert elements(update) == used
    per_run = (call.state[STEP], call.state["moment"], call.gradients)
    assert {len(one) for one in per_run} == {len(call.params)}
    assert [p.shape for p in call.params] == [m.shape for m in call.state["moment"]]
    assert len(call.params) < sum(len(one.params) for one in held)
    assert call.gradients == list(range(len(call.params)))
    assert update.lasts
    assert [counted.item() for counted in update.counted if counted is not None] == [1] * len(held)


def test_every_strategy_has_the_same_runs() -> None:
    """What is cut between ranks elsewhere is cut in the same places where one rank has all."""
    world = 3
    whole = keyed(held_at(world, "no_shard"), OLD)
    sizes = {rank: list[int]() for rank in range(world)}
    lengths = [param.numel() for param in whole.calls[0].params]
    for rank, numel in zip(whole.ranks, lengths, strict=True):
        sizes[rank].append(numel)
    for rank in range(world):
        mine = keyed(held_at(world, rank=rank), OLD)
        assert set(mine.ranks) == {rank}
        assert sizes[rank] == [param.numel() for param in mine.calls[0].params]


def test_groups_and_fresh_state_have_calls_of_their_own_and_ages_runs() -> None:
    held = held_at(1)
    runs = len(keyed(held, OLD).ranks)
    update = keyed(held, OLD, OTHER)
    assert [(call.group, call.is_first) for call in update.calls] == [(0, False), (1, False)]
    assert update.calls[1].state == {}
    assert not keyed(held, OLD, NEW).lasts
    assert len(keyed(held, OLD, NEW).calls) == 2
    older = keyed(held, OLD, OLDER)
    assert len(older.calls) == 1
    assert len(older.ranks) >= runs
    assert elements(older) == elements(update) == elements(keyed(held, OLD))


def test_a_slot_without_a_gradient_is_neither_updated_nor_counted() -> None:
    held = held_at(1)
    update = keyed(held, OLD, None)
    at = held[1].solid[0]
    assert elements(keyed(held, OLD)) - elements(update) == held[1].values[at].numel()
    assert all(param is not held[1].params[at] for param in update.params)
    counted = update.counted[1]
    assert counted is not None
    assert counted.sum() == len(held[1].params) - 1


def test_a_group_that_does_not_count_is_not_counted() -> None:
    held = held_at(1)
    assert keyed(held, OTHER).counted == [None] * len(held)
    mixed = keyed(held, OTHER, OLD).counted[1]
    assert mixed is not None
    assert mixed.sum() == 1


def test_dtypes_have_calls_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())
    sharded = sw.shard(model)
    held = [FlatState(b, {id(p): 0 for p in model.parameters()}) for b in sharded.buckets]
    update = decide(held, [[OLD] * len(one.params) for one in held], NAMES)
    assert [{p.dtype for p in call.params} for call in update.calls] == [
        {torch.float32},
        {torch.bfloat16},
    ]


def test_the_views_are_the_runs_in_the_order_of_their_numbers() -> None:
    held = held_at(3)
    update = keyed(held, OLD, OTHER)
    slices = [
        piece
        for one, views in zip(held, update.views, strict=True)
        if views is not None
        for piece in views(one.shard)
    ]
    for call in update.calls:
        for param, at in zip(call.params, call.gradients, strict=True):
            assert (param.data_ptr(), param.shape) == (slices[at].data_ptr(), slices[at].shape)


# --- Runs: what touches and is updated alike goes together, within one rank's piece -----


def drawn(slots: str, keys: str, piece: int) -> str:
    """``slots``: an element each, a letter for each slot, ``.`` is padding. Each run in brackets.

    ``keys``: one for each slot in order; ``-`` is a slot without a gradient.
    """
    names = list(dict.fromkeys(slots.replace(".", "")))
    places = [(slots.index(name), slots.rindex(name) + 1) for name in names]
    listed = runs(places, [None if key == "-" else key for key in keys], piece)
    return " ".join(f"[{slots[run.start : run.stop]}]{run.key}" for run in listed)


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
    listed = runs([(0, 2), (2, 2), (2, 5), (5, 5)], ["x", "y", "x", "x"], 8)
    assert [(run.start, run.stop, run.first) for run in listed] == [(0, 5, 0)]
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
    listed = runs(places, keys, piece)
    expected = {
        element: key
        for (start, stop), key in zip(places, keys, strict=True)
        for element in range(start, stop)
        if key is not None
    }
    covered = [(e, run.key) for run in listed for e in range(run.start, run.stop)]
    assert dict(covered) == expected
    assert len(covered) == len(expected)
    for run in listed:
        assert run.start // piece == (run.stop - 1) // piece
        assert places[run.first][0] <= run.start < places[run.first][1]
    for one, other in pairwise(listed):
        assert one.stop < other.start or one.key != other.key or other.start % piece == 0
