"""A place in a schedule: what is expected, what is a surprise, and what is remembered."""

from __future__ import annotations

from shardwise.config.strategies import placement_of
from shardwise.plan.order import mirror
from shardwise.plan.schedule.cursor import Cursor
from shardwise.plan.schedule.decide import Step, events, steps
from shardwise.plan.schedule.events import Cue, Event, Op, Order, Phase, Policy, UnitBytes
from tests.plan.schedule.test_decide import everywhere

FORWARD = tuple(
    Cue(op, unit, Phase.FORWARD) for unit in ("a", "b", "c") for op in (Op.ENTER, Op.EXIT)
)
ORDER = Order(FORWARD, mirror(FORWARD))
END = Cue(Op.END, "", Phase.BACKWARD)


def script(order: Order = ORDER) -> tuple[Step, ...]:
    nbytes = {cue.unit: UnitBytes(100, 100) for cue in order.forward}
    return steps(order, Policy(everywhere(placement_of("full_shard"))), nbytes)


def enter(unit: str, phase: Phase = Phase.FORWARD) -> Cue:
    return Cue(Op.ENTER, unit, phase)


def leave(unit: str, phase: Phase = Phase.FORWARD) -> Cue:
    return Cue(Op.EXIT, unit, phase)


def test_a_step_that_follows_gets_each_cues_events_in_order() -> None:
    cursor = Cursor("train", script())
    issued: list[Event] = []
    for cue in (*ORDER.forward, *ORDER.backward, END):
        step = cursor.match(cue)
        assert step is not None
        issued += step.in_order()
    nbytes = {unit: UnitBytes(100, 100) for unit in "abc"}
    assert tuple(issued) == events(ORDER, Policy(everywhere(placement_of("full_shard"))), nbytes)
    assert not cursor.improvised
    assert cursor.match(enter("a")) is None  # nothing comes after the end
    assert cursor.improvised


def test_from_the_first_surprise_on_there_is_no_answer() -> None:
    cursor = Cursor("train", script())
    assert cursor.match(enter("a")) is not None
    assert cursor.match(leave("a")) is not None
    assert cursor.match(enter("c")) is None
    assert cursor.improvised
    assert cursor.match(leave("b")) is None


def test_what_really_happened_is_the_next_order() -> None:
    cursor = Cursor("train", script())
    forward = [enter("a"), leave("a"), enter("c"), leave("c")]
    back = [enter("c", Phase.BACKWARD), leave("c", Phase.BACKWARD)]
    for cue in (*forward, *back, END):
        cursor.match(cue)
    assert cursor.changed_order() == Order(tuple(forward), tuple(back))


def test_a_cursor_without_a_script_has_ended_and_may_only_improvise() -> None:
    cursor = Cursor("train", ())
    assert (cursor.ended, cursor.improvised) == (True, True)
    cursor.improvise()
    assert (cursor.ended, cursor.improvised) == (False, True)
    assert cursor.match(enter("a")) is None
    assert cursor.changed_order() == Order((enter("a"),))


def test_another_forward_pass_goes_on_only_where_the_schedule_lists_one() -> None:
    once = Cursor("train", script())
    assert once.lists_forward("train", "a")
    for cue in FORWARD:
        once.match(cue)
    assert not once.lists_forward("train", None)  # the backward pass comes next
    twice = Cursor("train", script(Order(FORWARD * 2, mirror(FORWARD * 2))))
    for cue in FORWARD:
        twice.match(cue)
    forwards = [("train", "a"), ("train", None), ("train", "b"), ("accumulate", "a")]
    assert [twice.lists_forward(*one) for one in forwards] == [True, True, False, False]
    twice.match(enter("b"))
    assert not twice.lists_forward("train", None)


def test_no_order_is_learnt_from_a_step_that_follows_or_from_a_backward_pass_alone() -> None:
    follows, second = Cursor("train", script()), Cursor("train", script())
    for cue in ORDER.forward:
        follows.match(cue)
    second.match(enter("c", Phase.BACKWARD))
    assert [follows.changed_order(), second.changed_order()] == [None, None]


def test_a_unit_is_owed_as_many_backward_passes_as_it_was_entered() -> None:
    cursor, owed = Cursor("train", ()), []
    back = [enter("a", Phase.BACKWARD), leave("a", Phase.BACKWARD)]
    for cue in (enter("a"), leave("a"), enter("a"), leave("a"), *back, *back):
        cursor.match(cue)
        owed.append(cursor.awaits_backward("a", Op.EXIT))
    assert owed == [True] * 7 + [False]
    assert not cursor.awaits_backward("b", Op.EXIT)
