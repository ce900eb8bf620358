"""The schedules of a model: kept for each kind and mode of a step, changed by what really ran."""

from __future__ import annotations

import pytest

from shardwise.config.strategies import placement_of
from shardwise.plan.order import mirror
from shardwise.plan.schedule.decide import Step
from shardwise.plan.schedule.events import Cue, Op, Order, Phase, Policy, UnitBytes
from shardwise.runtime import schedules
from shardwise.runtime.schedules import Schedules
from shardwise.runtime.unit import UnitState

NAMES = ("a", "b")


class Unit(UnitState):
    """A unit without buckets, but not without bytes."""

    def nbytes(self) -> UnitBytes:
        return UnitBytes(100, 100, 100)


def order_of(*names: str) -> Order:
    """One unit after the other, and back."""
    ops = (Op.ENTER, Op.EXIT)
    cues = tuple(Cue(op, name, Phase.FORWARD) for name in names for op in ops)
    return Order(cues, mirror(cues))


def new(strategy: str = "full_shard") -> Schedules:
    units = {name: Unit(name, ()) for name in NAMES}
    placements = dict.fromkeys(NAMES, placement_of(strategy))
    return Schedules(units, Policy(placements), order_of(*NAMES))


def ops(script: tuple[Step, ...]) -> set[Op]:
    return {event.op for step in script for event in step.events}


def test_each_mode_gathers_and_reduces_what_it_must() -> None:
    full, kept = new(), new("shard_grad_op")
    assert {Op.GATHER, Op.REDUCE} <= ops(full.script("train"))
    assert Op.REDUCE not in ops(full.script("accumulate"))
    assert Op.REDUCE not in ops(full.script("forward"))
    assert Op.GATHER in ops(full.script("last"))
    # Where units stay whole while gradients are accumulated, the last micro-batch finds them so.
    assert Op.GATHER not in ops(kept.script("last"))
    assert {Op.GATHER, Op.REDUCE} <= ops(kept.script("train"))


def test_only_the_first_change_of_an_order_that_a_step_has_followed_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, order_ab, order_ba = new(), order_of("a", "b"), order_of("b", "a")
    counts = []
    for order in (order_ba, order_ba, None, order_ab, order_ba):  # no step had followed the guess
        model.learn("train", order, logs=True)
        counts.append(len(caplog.messages))
        assert order in (None, model.orders["train"])
    assert counts == [0, 0, 0, 1, 1]
    assert model.steps_done == 5
    model.learn("forward", None, logs=True)
    assert model.steps_done == 5


def test_a_script_is_built_once_and_anew_for_another_order() -> None:
    model = new()
    script = model.script("train")
    assert model.script("train") is script
    model.set_order("train", order_of("b", "a"))
    assert model.script("train") != script


def test_each_kind_of_step_keeps_its_orders_as_long_as_there_is_room() -> None:
    model, back = new(), order_of("b", "a")
    model.turn_to(frozenset("a"))
    model.learn("train", back, logs=True)
    model.turn_to(frozenset("b"))  # begins with what is known
    assert model.orders["train"] == back
    model.learn("train", order_of("a"), logs=True)
    model.turn_to(frozenset("a"))
    assert model.orders["train"] == back
    for number in range(schedules.KINDS - 1):
        model.turn_to(frozenset([str(number)]))
    model.turn_to(frozenset("a"))  # the others have pushed out all but this one
    assert model.ran == {"train"}
    model.turn_to(frozenset("b"))
    assert model.ran == set()
