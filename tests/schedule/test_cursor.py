"""A place in a schedule: what is expected, what is a surprise, and what is remembered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import pytest

from shardwise.errors import ScheduleError
from shardwise.schedule.cursor import Cursor, Step, steps
from shardwise.schedule.events import Cue, Event, Op, Order, Phase, Policy, UnitBytes, events
from shardwise.schedule.improvise import Facts, is_due
from shardwise.setup.order import mirror
from shardwise.strategies import placement_of
from tests.schedule.test_events import everywhere, layers, listed

FORWARD = tuple(
    Cue(op, unit, Phase.FORWARD) for unit in ("a", "b", "c") for op in (Op.ENTER, Op.EXIT)
)
ORDER = Order(FORWARD, mirror(FORWARD))
END = Cue(Op.END, "", Phase.BACKWARD)


def script(order: Order = ORDER) -> tuple[Step, ...]:
    nbytes = {cue.unit: UnitBytes(100, 100) for cue in order.forward}
    return steps(events(order, Policy(everywhere(placement_of("full_shard"))), nbytes))


def enter(unit: str, phase: Phase = Phase.FORWARD) -> Cue:
    return Cue(Op.ENTER, unit, phase)


def leave(unit: str, phase: Phase = Phase.FORWARD) -> Cue:
    return Cue(Op.EXIT, unit, phase)


def test_a_schedule_is_cut_into_one_step_per_cue() -> None:
    assert [step.cue for step in script()] == [*ORDER.forward, *ORDER.backward, END]


def test_nothing_is_gathered_after_a_cue_only_before_the_next() -> None:
    cut = steps(listed(layers(2), Policy(everywhere(placement_of("full_shard")))))
    assert {event.op for step in cut for event in step.after} == {Op.FREE, Op.REDUCE, Op.SETTLE}
    cut = steps(listed(layers(2), Policy(everywhere(placement_of("zero1")))))
    assert cut[0].after == cut[1].after == ()


def test_a_step_that_follows_gets_each_cues_events_in_order() -> None:
    cursor, taken = Cursor("train", script()), []
    for cue in (*ORDER.forward, *ORDER.backward, END):
        step = cursor.match(cue)
        assert step is not None
        taken += [*step.before, Event(*cue), *step.after]
    nbytes = {unit: UnitBytes(100, 100) for unit in "abc"}
    assert tuple(taken) == events(ORDER, Policy(everywhere(placement_of("full_shard"))), nbytes)
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
    seen = [enter("a"), leave("a"), enter("c"), leave("c")]
    back = [enter("c", Phase.BACKWARD), leave("c", Phase.BACKWARD)]
    for cue in (*seen, *back, END):
        cursor.match(cue)
    assert cursor.changed_order() == Order(tuple(seen), tuple(back))


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
    asked = [("train", "a"), ("train", None), ("train", "b"), ("accumulate", "a")]
    assert [twice.lists_forward(*one) for one in asked] == [True, True, False, False]
    twice.match(enter("b"))
    assert not twice.lists_forward("train", None)


def test_no_order_is_learnt_from_a_step_that_follows_or_from_a_backward_pass_alone() -> None:
    follows, second = Cursor("train", script()), Cursor("train", script())
    for cue in ORDER.forward:
        follows.match(cue)
    second.match(enter("c", Phase.BACKWARD))
    assert [follows.changed_order(), second.changed_order()] == [None, None]


# ---- ranks that do not call the same units -------------------------------------------------------


class Rank:
    """Plays calls of units, and back again, as the runtime does; keeps what it carries out."""

    def __init__(self, strategy: str, mode: str, forward: tuple[Cue, ...] = FORWARD) -> None:
        self.policy = replace(
            Policy(everywhere(placement_of(strategy)), participates=True),
            reduces=mode != "accumulate",
        )
        order = Order(forward) if mode == "forward" else Order(forward, mirror(forward))
        nbytes = {unit: UnitBytes(100, 100) for unit in "abc"}
        self.listed = events(order, self.policy, nbytes)
        self.cursor = Cursor(mode, steps(self.listed), participates=True)
        self.facts, self.carried_out = Facts(), list[Event]()

    def play(self, calls: str, mode: str, side_by_side: bool) -> None:
        for unit in calls:
            self.cue(enter(unit))
            self.cue(leave(unit))
        back = "" if mode == "forward" else calls[::-1]
        for unit in back:
            self.cue(enter(unit, Phase.BACKWARD))
            if not side_by_side:
                self.cue(leave(unit, Phase.BACKWARD))
        for unit in back[::-1] if side_by_side else "":
            self.cue(leave(unit, Phase.BACKWARD))
        self.cue(END._replace(phase=Phase.FORWARD) if mode == "forward" else END)

    def cue(self, cue: Cue) -> None:
        calls = self.facts.forward if cue.phase is Phase.FORWARD else self.facts.backward
        enters = cue.op is Op.ENTER and self.policy.gathers(cue.unit)
        needed = enters and cue.unit not in self.facts.gathered
        calls[cue.unit] -= cue.op is Op.EXIT
        step = self.cursor.match(cue, needed)
        assert step is not None
        for event in (*step.before, Event(*cue), *step.after):
            if event.op in (Op.ENTER, Op.EXIT, Op.END):
                self.carried_out.append(event)
            elif is_due(event, self.facts):
                self.facts.note(event)
                self.carried_out.append(event)
        assert cue.unit in self.facts.gathered or not needed
        calls[cue.unit] += cue.op is Op.ENTER


def sent(listed: Iterable[Event]) -> list[tuple[Op, str]]:
    """What all ranks have to do in one order."""
    collective = (Op.GATHER, Op.REDUCE, Op.SETTLE)
    return [(event.op, event.unit) for event in listed if event.op in collective]


@pytest.mark.parametrize("strategy", ["zero1", "full_shard"])
def test_a_rank_that_calls_what_is_listed_carries_out_exactly_that(strategy: str) -> None:
    for mode, calls in product(("train", "accumulate", "forward"), ("abc", "aba")):
        forward = tuple(cue for unit in calls for cue in (enter(unit), leave(unit)))
        rank = Rank(strategy, mode, forward)
        rank.play(calls, mode, side_by_side=False)
        assert [event[:3] for event in rank.carried_out] == [event[:3] for event in rank.listed]


CALLS = ["".join(calls) for n in range(4) for calls in product("abc", repeat=n)]


@pytest.mark.parametrize("strategy", ["no_shard", "zero1", "shard_grad_op", "full_shard"])
def test_whatever_a_rank_calls_it_carries_out_what_the_schedule_lists(strategy: str) -> None:
    for mode, calls, side_by_side in product(("train", "accumulate", "forward"), CALLS, (0, 1)):
        rank = Rank(strategy, mode)
        if strategy == "full_shard" and list(calls) != sorted(calls):
            with pytest.raises(ScheduleError, match="after its last place in the order of units"):
                rank.play(calls, mode, bool(side_by_side))
            continue
        rank.play(calls, mode, bool(side_by_side))
        assert sent(rank.carried_out) == sent(rank.listed), calls
        back = [event[:2] for event in rank.carried_out if event.phase is Phase.BACKWARD]
        computed = Op.ENTER if side_by_side else Op.EXIT  # when all gradients have come
        for unit in set(calls) if mode == "train" else ():
            reduced = back.index((Op.REDUCE, unit))
            assert back[:reduced].count((computed, unit)) == calls.count(unit)
            exited = len(back) - back[::-1].index((Op.EXIT, unit))
            assert strategy != "full_shard" or (Op.FREE, unit) in back[exited - 1 :]


def test_a_unit_that_is_whole_may_be_called_again_at_any_place() -> None:
    cursor = Cursor("train", script(), participates=True)
    taken = [cursor.match(cue) for cue in (enter("a"), leave("a"), enter("a"), leave("a"))]
    assert [step and (*step.before, *step.after) for step in taken[1:]] == [(), (), ()]
    assert not cursor.improvised
    step = cursor.match(enter("b"), needed=True)
    assert step is not None
    assert [event.op for event in step.before] == [Op.FREE, Op.GATHER]  # a's and c's


def test_who_participates_goes_on_with_its_schedule_in_another_forward_pass() -> None:
    cursor = Cursor("train", script(), participates=True)
    for cue in FORWARD:
        cursor.match(cue)
    asked = [("train", "a"), ("train", None), ("accumulate", "a")]
    assert [cursor.lists_forward(*one) for one in asked] == [True, True, False]


def test_who_participates_learns_no_order_and_recomputes_no_unit_that_is_not_gathered() -> None:
    cursor = Cursor("train", script(), participates=True)
    with pytest.raises(ScheduleError, match="unit 'b' is recomputed before its place in the order"):
        cursor.check_recomputed("b")
    cursor.improvise()
    cursor.check_recomputed("b")
    assert cursor.match(enter("c")) is None
    assert cursor.changed_order() is None


def test_a_unit_is_owed_as_many_backward_passes_as_it_was_entered() -> None:
    cursor, owed = Cursor("train", ()), []
    back = [enter("a", Phase.BACKWARD), leave("a", Phase.BACKWARD)]
    for cue in (enter("a"), leave("a"), enter("a"), leave("a"), *back, *back):
        cursor.match(cue)
        owed.append(cursor.awaits_backward("a", Op.EXIT))
    assert owed == [True] * 7 + [False]
    assert not cursor.awaits_backward("b", Op.EXIT)
