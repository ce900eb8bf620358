"""What is done where no schedule says it, as tables: facts and a cue, and the events of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from shardwise.schedule.events import Cue, Event, Op, Phase, Policy
from shardwise.schedule.improvise import (
    Facts,
    end_events,
    improvise,
    is_due,
    reduces_left_over,
    released,
)
from shardwise.strategies import placement_of
from tests.steps import STRATEGIES

TRAINED = Facts(trained=frozenset("abc"))
ACCUMULATES = replace(TRAINED, reduces=False)


def policy(strategy: str) -> Policy:
    return Policy({"a": placement_of(strategy)})


def listed(events: Iterable[Event]) -> str:
    """``"free a, reduce a"``"""
    return ", ".join(f"{event.op} {event.unit}" for event in events)


def left(strategy: str, facts: Facts, phase: Phase = Phase.BACKWARD, last: bool = True) -> str:
    """What follows when a call of unit ``a`` has ended."""
    return listed(improvise(policy(strategy), facts, Cue(Op.EXIT, "a", phase), last))


# ---- at a cue ----------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", Phase)
def test_a_unit_is_gathered_on_demand_when_a_call_begins(phase: Phase) -> None:
    cue = Cue(Op.ENTER, "a", phase)
    expected = [Event(Op.GATHER, "a", phase, "on demand")]
    assert improvise(policy("full_shard"), TRAINED, cue, last=False) == expected


def test_nothing_is_improvised_at_the_end_of_a_pass() -> None:
    cue = Cue(Op.END, "", Phase.BACKWARD)
    assert improvise(policy("full_shard"), TRAINED, cue, last=True) == []


AFTER_FORWARD = {"no_shard": "", "zero1": "", "shard_grad_op": "", "full_shard": "free a"}
AFTER_THE_LAST = {
    "no_shard": "reduce a",
    "zero1": "reduce a",
    "shard_grad_op": "free a, reduce a",
    "full_shard": "free a, reduce a",
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_after_a_forward_call_only_a_strategy_that_frees_frees(strategy: str) -> None:
    assert left(strategy, TRAINED, Phase.FORWARD) == AFTER_FORWARD[strategy]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_after_the_last_backward_call_a_unit_is_freed_and_reduced(strategy: str) -> None:
    assert left(strategy, TRAINED) == AFTER_THE_LAST[strategy]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_is_reduced_while_another_call_is_to_come_or_gradients_accumulate(
    strategy: str,
) -> None:
    assert left(strategy, TRAINED, last=False) == AFTER_FORWARD[strategy]
    assert left(strategy, ACCUMULATES) == AFTER_FORWARD[strategy]


def test_a_unit_in_which_nothing_is_trained_is_freed_and_not_reduced() -> None:
    assert left("full_shard", Facts(trained=frozenset("bc"))) == "free a"


def test_a_reduce_settles_those_before_it() -> None:
    facts = replace(TRAINED, reducing=["c", "b"])
    assert left("full_shard", facts) == "free a, reduce a, settle c, settle b"


# ---- is it due? --------------------------------------------------------------------------------

GATHERED = Facts(gathered={"a"})
DUE: dict[str, tuple[Op, Facts, bool]] = {
    "a unit at rest is gathered": (Op.GATHER, Facts(), True),
    "one that is gathered is not": (Op.GATHER, GATHERED, False),
    "a gathered unit is freed": (Op.FREE, GATHERED, True),
    "one at rest is not": (Op.FREE, Facts(), False),
    "nor in a forward call": (Op.FREE, replace(GATHERED, forward=Counter("a")), False),
    "nor in a backward call": (Op.FREE, replace(GATHERED, backward=Counter("a")), False),
    "nor while something outside reads it": (Op.FREE, replace(GATHERED, pinned={"a"}), False),
    "nor while a graph waits": (Op.FREE, replace(GATHERED, keeps_graph=True), False),
    "calls of other units do not matter": (
        Op.FREE,
        replace(GATHERED, forward=Counter("b"), backward=Counter("c"), pinned={"d"}),
        True,
    ),
    "what is collected is reduced": (Op.REDUCE, Facts(), True),
    "a reduce in flight is settled": (Op.SETTLE, Facts(reducing=["b", "a"]), True),
    "any other is not": (Op.SETTLE, Facts(reducing=["b"]), False),
    "what is settled is stored": (Op.STORE, Facts(settled={"a"}), True),
    "and not before": (Op.STORE, Facts(reducing=["a"]), False),
    "a shard in host memory is loaded": (Op.LOAD, Facts(updated={"a"}), True),
    "and not again": (Op.LOAD, Facts(loaded={"a"}), False),
    "nor while a graph keeps it whole": (Op.LOAD, replace(GATHERED, keeps_graph=True), False),
    "nor is it updated then": (Op.UPDATE, replace(GATHERED, keeps_graph=True), False),
}


@pytest.mark.parametrize("name", DUE)
def test_an_event_is_carried_out_if_it_is_due(name: str) -> None:
    op, facts, due = DUE[name]
    assert is_due(Event(op, "a", Phase.BACKWARD), facts) is due


# ---- the end of a pass -------------------------------------------------------------------------


def test_what_was_collected_and_is_not_on_its_way_is_reduced_before_the_pass_ends() -> None:
    facts = replace(TRAINED, reducing=["b"])
    assert listed(reduces_left_over(facts, ["a", "b", "c"])) == "reduce a, reduce c"
    assert reduces_left_over(ACCUMULATES, ["a"]) == []


def test_after_a_backward_pass_what_is_in_flight_is_settled_in_its_order_then_units_are_freed() -> (
    None
):
    facts = replace(TRAINED, reducing=["c", "b"], gathered={"a", "b", "d"})
    phase = Phase.BACKWARD
    assert (
        listed(end_events(policy("full_shard"), facts, "abc", phase))
        == "settle c, settle b, free a, free b"
    )
    assert listed(end_events(policy("full_shard"), facts, "", phase)) == "settle c, settle b"


def test_a_forward_pass_without_gradients_ends_no_reduce_of_a_backward_pass_around_it() -> None:
    facts = replace(TRAINED, reducing=["c"], gathered={"a", "b"})
    assert listed(end_events(policy("full_shard"), facts, "ab", Phase.FORWARD)) == "free a, free b"


def test_what_is_carried_out_is_a_fact() -> None:
    facts = Facts(gathered={"b"}, reducing=["b", "c"])
    for op, unit in ((Op.GATHER, "a"), (Op.FREE, "b"), (Op.REDUCE, "a"), (Op.SETTLE, "b")):
        facts.note(Event(op, unit, Phase.BACKWARD))
    assert (facts.gathered, facts.reducing) == ({"a"}, ["c", "a"])


def test_what_the_device_does_not_keep_is_loaded_again_after_it_was_freed() -> None:
    for reloads in (frozenset[str](), frozenset("a")):
        facts = Facts(gathered={"a"}, loaded={"a"}, reloads=reloads)
        facts.note(Event(Op.FREE, "a", Phase.FORWARD))
        assert is_due(Event(Op.LOAD, "a", Phase.BACKWARD), facts) is bool(reloads)


def test_on_demand_a_unit_is_loaded_and_what_settles_is_stored() -> None:
    offloads = replace(policy("full_shard"), loads=frozenset("a"), stores=frozenset("b"))
    cue = Cue(Op.ENTER, "a", Phase.FORWARD)
    assert listed(improvise(offloads, TRAINED, cue, last=False)) == "load a, gather a"
    facts = replace(TRAINED, reducing=["b"], gathered={"a"})
    cue = Cue(Op.EXIT, "a", Phase.BACKWARD)
    done = "free a, reduce a, settle b, store b"
    assert listed(improvise(offloads, facts, cue, last=True)) == done
    assert listed(end_events(offloads, facts, "a", Phase.BACKWARD)) == "settle b, store b, free a"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_between_micro_batches_only_a_strategy_that_frees_releases_a_unit(strategy: str) -> None:
    assert released(policy(strategy), TRAINED, "a") == ["a"]
    assert released(policy(strategy), ACCUMULATES, "a") == ["a"] * (strategy == "full_shard")


def test_a_pin_ends_but_for_units_of_another_pass_and_of_forward_calls_under_way() -> None:
    facts = Facts(pinned=set("abc"), forward=Counter("b"), backward=Counter("a"))
    facts.unpin(keep="c")
    assert facts.pinned == {"b", "c"}


def test_a_pass_that_stopped_leaves_only_what_is_collected_and_in_flight() -> None:
    facts = Facts(True, frozenset("a"), {"a"}, Counter("a"), Counter("a"), {"a"}, True, ["a"])
    facts.forget_pass()
    assert facts == Facts(trained=frozenset("a"), reducing=["a"])


MODES = {(True, False): "train", (True, True): "last", (False, True): "accumulate"}


@pytest.mark.parametrize(("reduces", "collected"), MODES)
def test_the_mode_follows_from_what_is_averaged_and_what_was_collected(
    reduces: bool, collected: bool
) -> None:
    assert Facts(reduces=reduces).mode(collected) == MODES[reduces, collected]


def test_what_the_optimizers_of_copies_wrote_is_joined_once_in_a_step() -> None:
    cue, facts = Cue(Op.ENTER, "a", Phase.FORWARD), Facts()
    joins = replace(policy("hybrid_full"), joins=frozenset("a"))
    update, gather = improvise(joins, facts, cue, last=False)
    assert (update.op, gather.op) == (Op.UPDATE, Op.GATHER)
    assert is_due(update, facts)
    facts.note(update)
    assert (facts.updated, facts.gathered) == ({"a"}, set())
    assert not is_due(update, facts)
    facts.forget_pass()
    assert is_due(update, facts)


def test_what_a_reduction_left_is_stored_once_after_it_has_settled() -> None:
    facts, store = Facts(reducing=["a"]), Event(Op.STORE, "a", Phase.BACKWARD)
    due = [is_due(store, facts)]
    for op in (Op.SETTLE, Op.STORE):
        facts.note(Event(op, "a", Phase.BACKWARD))
        due.append(is_due(store, facts))
    assert due == [False, True, False]


def test_what_was_made_of_an_old_shard_expires() -> None:
    facts = Facts(updated=set("ab"), loaded=set("ab"))
    facts.expire("a")
    assert (facts.updated, facts.loaded) == ({"b"}, {"b"})
