"""What happens at each cue, and one step as a list: the tables below are the specification.

The first group reproduces what PyTorch's own FSDP2 tests expect
(``test/distributed/_composable/fsdp/test_fully_shard_comm.py``, class ``TestFullyShardPrefetch``):
a root with three or four layers, gathers, frees ("reshard") and reduces ("post_backward").
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import takewhile
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config.placement import Placement
from shardwise.config.prefetch import Prefetch
from shardwise.config.strategies import placement_of
from shardwise.errors import ConfigError
from shardwise.plan.order import mirror
from shardwise.plan.schedule import decide as deciding
from shardwise.plan.schedule.decide import Facts, Step, Upcoming, decide, events, steps
from shardwise.plan.schedule.events import Cue, Event, Mode, Op, Order, Phase, Policy, UnitBytes
from tests.steps import STRATEGIES

CUES = (Op.ENTER, Op.EXIT, Op.END)
FULL = placement_of("full_shard")
ZERO2 = placement_of("shard_grad_op")
ZERO1 = placement_of("zero1")
DDP = placement_of("no_shard")


def everywhere(placement: Placement) -> Mapping[str, Placement]:
    """Every unit lives there."""
    return defaultdict(lambda: placement)


def layers(count: int) -> Order:
    """A root unit around ``count`` layers."""
    cues = [Cue(Op.ENTER, "root", Phase.FORWARD)]
    for layer in range(count):
        cues += [Cue(Op.ENTER, f"layers.{layer}", Phase.FORWARD)]
        cues += [Cue(Op.EXIT, f"layers.{layer}", Phase.FORWARD)]
    cues.append(Cue(Op.EXIT, "root", Phase.FORWARD))
    return Order(tuple(cues), mirror(cues))


def weights(order: Order, nbytes: int = 100) -> dict[str, UnitBytes]:
    return {cue.unit: UnitBytes(nbytes, nbytes) for cue in order.forward}


def listed(order: Order, policy: Policy, mode: Mode = "train") -> tuple[Event, ...]:
    return events(order, policy, weights(order), mode)


def played(order: Order, policy: Policy) -> tuple[Step, ...]:
    return steps(order, policy, weights(order))


def table(script: tuple[Event, ...], phase: Phase, *ops: Op) -> str:
    return "\n".join(f"{e.op} {e.unit}" for e in script if e.phase is phase and e.op in ops)


def rows(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def units_ahead(count: int) -> int:
    """A prefetch depth in bytes that holds ``count`` units of 100 bytes."""
    return count * 100


# ---- PyTorch's tables ------------------------------------------------------------------------


def policy(forward: int, backward: int, **changes: object) -> Policy:
    prefetch = Prefetch(units_ahead(forward), units_ahead(backward))
    return replace(Policy(everywhere(FULL), prefetch), **changes)  # type: ignore[arg-type]


def test_forward_without_prefetch_gathers_each_unit_when_it_is_entered() -> None:
    script = listed(layers(3), policy(forward=0, backward=1))
    assert table(script, Phase.FORWARD, Op.GATHER) == rows("""
        gather root
        gather layers.0
        gather layers.1
        gather layers.2
    """)


def test_backward_gathers_one_ahead_what_was_freed() -> None:
    """The root and the last layer were not: they would have been gathered again at once."""
    script = listed(layers(3), policy(0, 1))
    assert table(script, Phase.FORWARD, Op.FREE) == "free layers.0\nfree layers.1"
    assert table(script, Phase.BACKWARD, Op.GATHER, Op.REDUCE) == rows("""
        gather layers.1
        reduce layers.2
        gather layers.0
        reduce layers.1
        reduce layers.0
        reduce root
    """)


def test_backward_with_reshard_false_gathers_nothing() -> None:
    script = listed(layers(3), policy(0, 1, placements=everywhere(ZERO2)))
    assert table(script, Phase.BACKWARD, Op.GATHER, Op.REDUCE) == rows("""
        reduce layers.2
        reduce layers.1
        reduce layers.0
        reduce root
    """)


def test_forward_prefetch_one() -> None:
    script = listed(layers(4), policy(forward=1, backward=1))
    assert table(script, Phase.FORWARD, Op.GATHER, Op.FREE) == rows("""
        gather root
        gather layers.0
        gather layers.1
        free layers.0
        gather layers.2
        free layers.1
        gather layers.3
        free layers.2
    """)


def test_forward_prefetch_two() -> None:
    script = listed(layers(4), policy(forward=2, backward=1))
    assert table(script, Phase.FORWARD, Op.GATHER, Op.FREE) == rows("""
        gather root
        gather layers.0
        gather layers.1
        gather layers.2
        free layers.0
        gather layers.3
        free layers.1
        free layers.2
    """)


def test_backward_prefetch_two() -> None:
    script = listed(layers(4), policy(forward=0, backward=2))
    assert table(script, Phase.BACKWARD, Op.GATHER, Op.FREE, Op.REDUCE) == rows("""
        gather layers.2
        gather layers.1
        free layers.3
        reduce layers.3
        gather layers.0
        free layers.2
        reduce layers.2
        free layers.1
        reduce layers.1
        free layers.0
        reduce layers.0
        free root
        reduce root
    """)


# ---- our own defaults --------------------------------------------------------------------------


def test_backward_pre_gathers_before_this_units_gradients_and_post_after_them() -> None:
    both = (Op.GATHER, Op.ENTER, Op.EXIT, Op.REDUCE)
    pre = listed(layers(2), policy(0, 1))
    assert table(pre, Phase.BACKWARD, *both).startswith(
        rows("""
        gather layers.0
        enter root
        enter layers.1
        exit layers.1
        reduce layers.1
    """)
    )
    post = Policy(everywhere(FULL), Prefetch(0, units_ahead(1), when="post"))
    assert table(listed(layers(2), post), Phase.BACKWARD, *both).startswith(
        rows("""
        enter root
        enter layers.1
        exit layers.1
        gather layers.0
        reduce layers.1
    """)
    )


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_never_more_gathers_in_flight_than_the_limit(limit: int) -> None:
    unlimited = Prefetch(10**9, 10**9, limit=limit)
    flying: set[str] = set()
    most = 0
    for event in listed(layers(6), Policy(everywhere(FULL), unlimited)):
        if event.op is Op.GATHER:
            flying.add(event.unit)
        elif event.op is Op.ENTER:
            flying.discard(event.unit)
        most = max(most, len(flying))
    assert most == limit


def test_prefetch_depth_is_in_bytes() -> None:
    order = layers(4)
    heavy = {**weights(order), "layers.1": UnitBytes(300, 300)}
    script = events(order, Policy(everywhere(FULL), Prefetch(250, 0)), heavy)
    assert table(script, Phase.FORWARD, Op.GATHER, Op.ENTER).startswith(
        rows("""
        gather root
        gather layers.0
        enter root
        enter layers.0
        gather layers.1
        gather layers.2
        gather layers.3
        enter layers.1
    """)
    )


def test_zero1_gathers_all_units_when_the_first_is_entered() -> None:
    first = played(layers(2), Policy(everywhere(ZERO1)))[0]
    gathered = [event.unit for event in first.events if event.op is Op.GATHER]
    assert gathered == ["root", "layers.0", "layers.1"]


def test_zero1_gathers_once_and_gives_back_at_the_end() -> None:
    script = listed(layers(2), Policy(everywhere(ZERO1)))
    assert table(script, Phase.FORWARD, Op.GATHER).count("gather") == 3
    assert table(script, Phase.BACKWARD, Op.GATHER) == ""
    assert [event.op for event in script[-4:]] == [Op.SETTLE, Op.FREE, Op.FREE, Op.FREE]


def test_a_unit_that_is_entered_again_before_it_is_left_is_reduced_once_at_the_outer_exit() -> None:
    """Two forward passes, one backward: the first embedding waits for both gradients."""
    forward = tuple(Cue(op, "a", Phase.FORWARD) for op in (Op.ENTER, Op.EXIT) * 2)
    nested = (Op.ENTER, Op.ENTER, Op.EXIT, Op.EXIT)
    backward = tuple(Cue(op, "a", Phase.BACKWARD) for op in nested)
    script = listed(Order(forward, backward), policy(0, 0))
    assert [event.op for event in script if event.phase is Phase.BACKWARD] == [
        *nested,
        Op.FREE,
        Op.REDUCE,
        Op.END,
        Op.SETTLE,
    ]


# ---- any order -------------------------------------------------------------------------------


@st.composite
def any_order(draw: st.DrawFn) -> Order:
    """Units around units, used again, also inside themselves, with and without a way back."""
    cues, around = list[Cue](), list[str]()
    for unit in draw(st.lists(st.sampled_from(["root", "a", "b", "c", None, None]), max_size=24)):
        if unit is not None:
            around.append(unit)
            cues.append(Cue(Op.ENTER, unit, Phase.FORWARD))
        elif around:
            cues.append(Cue(Op.EXIT, around.pop(), Phase.FORWARD))
    cues += [Cue(Op.EXIT, unit, Phase.FORWARD) for unit in reversed(around)]
    return Order(tuple(cues), mirror(cues) if draw(st.booleans()) else ())


def wanted_next(cues: Sequence[Cue], around: Sequence[str]) -> str | None:
    """The next unit to compute, besides those around it."""
    entered = (cue.unit for cue in cues if cue.op is Op.ENTER and cue.unit not in around)
    return next(entered, None)


@given(
    order=any_order(),
    placement=st.sampled_from([FULL, ZERO2, ZERO1]),
    depth=st.sampled_from([None, 0, 100, 250, 10**9]),
    when=st.sampled_from(["pre", "post"]),
)
def test_in_any_order_what_is_needed_next_is_gathered_next_and_kept_and_reduced_once(
    order: Order, placement: Placement, depth: int | None, when: Any
) -> None:
    cues = [*order.forward, *order.backward]
    gathered, around, reduced, at = set[str](), list[str](), list[str](), 0
    built = listed(order, Policy(everywhere(placement), Prefetch(depth, depth, when)))
    for number, event in enumerate(built):
        if event.op is Op.GATHER:
            assert event.unit == wanted_next(cues[at:], list(gathered))
            gathered.add(event.unit)
        elif event.op is Op.FREE:
            assert event.unit not in around
            gathered.remove(event.unit)
        elif event.op is Op.REDUCE:
            assert not any(cue.unit == event.unit for cue in cues[at:])
            reduced.append(event.unit)
        elif event.op in (Op.ENTER, Op.EXIT):
            assert Cue(*event[:3]) == cues[at]
            assert event.unit in gathered
            at += 1
        if event.op is Op.ENTER:
            around.append(event.unit)
        elif event.op is Op.EXIT:
            around.remove(event.unit)
            if placement.frees and event.unit not in around:
                after = takewhile(lambda e: e.op not in CUES, built[number + 1 :])
                freed = any((e.op, e.unit) == (Op.FREE, event.unit) for e in after)
                assert freed is (wanted_next(cues[at:], around) != event.unit)
    assert at == len(cues)
    assert sorted(reduced) == sorted({cue.unit for cue in order.backward})
    assert gathered == set()


def lines_run(order: Order, policy: Policy) -> int:
    """How many lines of the builder run."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace if frame.f_code.co_filename == deciding.__file__ else None

    before, heavy = sys.gettrace(), weights(order)
    sys.settrace(trace)
    try:
        events(order, policy, heavy)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("placement", [FULL, ZERO2, ZERO1, DDP])
@pytest.mark.parametrize("depth", [None, 10**9])
def test_a_schedule_of_twice_the_units_is_twice_the_work(
    placement: Placement, depth: int | None
) -> None:
    """A model that deviates at every step has it built at every step."""
    policy = Policy(everywhere(placement), Prefetch(depth, depth))
    once, twice = (lines_run(layers(n), policy) for n in (50, 100))
    assert twice < 2.1 * once


# ---- bad values ----------------------------------------------------------------------------------


def test_prefetch_refuses_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match="when is 'before'; choose one of 'pre', 'post'"):
        Prefetch(when="before")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="limit is 0"):
        Prefetch(limit=0)


def test_a_unit_sends_loads_and_stores_nothing_unless_it_says_so() -> None:
    assert UnitBytes(gathered=3, gradients=2) == (3, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0)


# ---- a shard that its copies split further -------------------------------------------------------

PIECES = placement_of("hybrid_full")
JOINED = frozenset(("root", "layers.0", "layers.1"))


def test_what_the_optimizers_of_copies_wrote_is_joined_before_a_units_first_gather_only() -> None:
    script = listed(layers(2), policy(0, 0, placements=everywhere(PIECES), joins=JOINED))
    assert table(script, Phase.FORWARD, Op.UPDATE, Op.GATHER) == rows("""
        update root
        gather root
        update layers.0
        gather layers.0
        update layers.1
        gather layers.1
    """)
    assert table(script, Phase.BACKWARD, Op.UPDATE, Op.GATHER) == "gather layers.0"


def test_a_unit_is_joined_when_it_is_gathered_and_not_when_the_one_before_it_ends() -> None:
    script = played(layers(2), policy(0, 0, placements=everywhere(PIECES), joins=JOINED))
    first = next(step for step in script if step.cue.unit == "layers.1")
    assert [event.op for event in first.events] == [Op.UPDATE, Op.GATHER]


# ---- offload ---------------------------------------------------------------------------------


LAYERS = frozenset({"root", "layers.0", "layers.1"})


def test_a_shard_in_host_memory_is_loaded_before_each_gather_or_once() -> None:
    once = listed(layers(2), policy(0, 0, loads=LAYERS))
    each = listed(layers(2), policy(0, 0, loads=LAYERS, reloads=LAYERS))
    assert {e.reason for e in once if e.op is Op.LOAD} == {"the optimizer has stepped"}
    assert {e.reason for e in each if e.op is Op.LOAD} == {"nothing of it is kept"}
    assert table(once, Phase.FORWARD, Op.LOAD, Op.GATHER) == rows("""
        load root
        gather root
        load layers.0
        gather layers.0
        load layers.1
        gather layers.1
    """)
    assert table(once, Phase.BACKWARD, Op.LOAD, Op.GATHER) == "gather layers.0"
    assert table(each, Phase.FORWARD, Op.LOAD) == table(once, Phase.FORWARD, Op.LOAD)
    assert table(each, Phase.BACKWARD, Op.LOAD, Op.GATHER) == "load layers.0\ngather layers.0"


def test_in_the_last_micro_batch_only_what_is_not_kept_is_loaded() -> None:
    last = policy(0, 0, loads=LAYERS, reloads=frozenset({"layers.0"}))
    script = listed(layers(2), last, "last")
    assert table(script, Phase.FORWARD, Op.LOAD) == "load layers.0"


def test_the_last_micro_batch_frees_no_unit_that_none_before_has_entered() -> None:
    placements = dict.fromkeys(["root", "layers.0", "unused"], ZERO1)
    given = replace(policy(0, 0), placements=placements)
    script = events(layers(1), given, weights(layers(1)), "last")
    assert {event.unit for event in script if event.op is Op.FREE} == {"root", "layers.0"}


# ---- one cue ---------------------------------------------------------------------------------


def flying(units: str) -> dict[str, bool]:
    """Their gradients are on their way, the oldest first; over the copies not yet."""
    return dict.fromkeys(units, False)


TRAINED = Facts(trained=frozenset("abc"))
ACCUMULATES = replace(TRAINED, reduces=False)
NOT_TRAINED = Facts(trained=frozenset("bc"))
FLYING = replace(TRAINED, reducing=flying("cb"), gathered={"a", "b", "d"})
END = Cue(Op.END, "", Phase.BACKWARD)
ENTER, EXIT = (Cue(op, "a", Phase.FORWARD) for op in (Op.ENTER, Op.EXIT))
BACK_IN, BACK_OUT = (Cue(op, "a", Phase.BACKWARD) for op in (Op.ENTER, Op.EXIT))
NOTHING, LAST, NEXT = Upcoming(), Upcoming(is_last=True), Upcoming(is_next=True)

# facts, cue, what is known of the rest → the events: of every strategy, or of those of each name
DECIDED: dict[str, tuple[Facts, Cue, Upcoming, str | Mapping[str, str]]] = {
    "a call gathers its unit": (TRAINED, ENTER, NOTHING, {"no_shard": "", "": "gather a"}),
    "so does its backward pass": (TRAINED, BACK_IN, NOTHING, {"no_shard": "", "": "gather a"}),
    "and what comes next": (
        TRAINED,
        ENTER,
        Upcoming(ahead="bc"),
        {"no_shard": "gather b, gather c", "": "gather a, gather b, gather c"},
    ),
    "after a forward call": (TRAINED, EXIT, NOTHING, {"full_shard": "free a", "": ""}),
    "while another call comes": (TRAINED, BACK_OUT, NOTHING, {"full_shard": "free a", "": ""}),
    "after the last backward call": (
        TRAINED,
        BACK_OUT,
        LAST,
        {"no_shard": "reduce a", "zero1": "reduce a", "": "free a, reduce a"},
    ),
    "while gradients accumulate": (ACCUMULATES, BACK_OUT, LAST, {"full_shard": "free a", "": ""}),
    "what computes next is kept": (TRAINED, BACK_OUT, NEXT, ""),
    "a unit in which nothing is trained": (
        NOT_TRAINED,
        BACK_OUT,
        LAST,
        {"no_shard": "", "zero1": "", "": "free a"},
    ),
    "another call of it is under way": (
        replace(TRAINED, backward=Counter("a")),
        BACK_OUT,
        LAST,
        {"no_shard": "", "zero1": "", "": "free a"},  # once that has ended
    ),
    "a reduce settles those before it": (
        replace(TRAINED, reducing=flying("cb")),
        BACK_OUT,
        LAST,
        {
            "no_shard": "reduce a, settle c, settle b",
            "zero1": "reduce a, settle c, settle b",
            "": "free a, reduce a, settle c, settle b",
        },
    ),
    "at the end": (FLYING, END, NOTHING, "settle c, settle b, free a, free b, free d"),
    "between micro-batches": (
        replace(ACCUMULATES, gathered={"a"}),
        END,
        NOTHING,
        {"full_shard": "free a", "": ""},
    ),
    "a pass without gradients inside a step": (
        FLYING,
        END._replace(phase=Phase.FORWARD),
        NOTHING,
        "free a, free b, free d",
    ),
}


def shown(events: Iterable[Event]) -> str:
    """``"free a, reduce a"``"""
    return ", ".join(f"{event.op} {event.unit}" for event in events)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", DECIDED)
def test_the_events_of_a_cue(name: str, strategy: str) -> None:
    facts, cue, upcoming, expected = DECIDED[name]
    shown_events = expected if isinstance(expected, str) else expected.get(strategy, expected[""])
    assert (
        shown(decide(Policy(everywhere(placement_of(strategy))), facts, cue, upcoming))
        == shown_events
    )


def test_a_unit_is_loaded_and_joined_before_it_is_gathered_and_what_settles_is_stored() -> None:
    offloads = Policy(everywhere(FULL), loads=frozenset("ab"), joins=frozenset("a"))
    assert shown(decide(offloads, TRAINED, ENTER, NOTHING)) == "load a, update a, gather a"
    facts = replace(TRAINED, reducing=flying("b"), gathered={"a"})
    assert shown(decide(offloads, facts, END, NOTHING)) == "settle b, store b, free a"


def test_a_hybrids_reduce_goes_on_over_its_copies_and_is_settled_a_call_later() -> None:
    hybrid = Policy(everywhere(FULL), averages=frozenset("abc"))
    facts = replace(TRAINED, reducing={"c": True, "b": False})
    done = [e for e in decide(hybrid, facts, BACK_OUT, LAST) if deepcopy(facts).take(e)]
    assert shown(done) == "settle c, reduce a, average b"
    late = [e for e in hybrid.settling("b", Phase.BACKWARD, "late") if facts.take(e)]
    assert shown(late) == "average b, settle b"
    assert not facts.take(Event(Op.AVERAGE, "c", Phase.BACKWARD))


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
    "a reduce in flight is settled": (Op.SETTLE, Facts(reducing=flying("ba")), True),
    "any other is not": (Op.SETTLE, Facts(reducing=flying("b")), False),
    "it goes on over the copies": (Op.AVERAGE, Facts(reducing={"a": False}), True),
    "once only": (Op.AVERAGE, Facts(reducing={"a": True}), False),
    "what is not on its way does not": (Op.AVERAGE, Facts(), False),
    "what is settled is stored": (Op.STORE, Facts(settled={"a"}), True),
    "and not before": (Op.STORE, Facts(reducing=flying("a")), False),
    "a shard in host memory is loaded": (Op.LOAD, Facts(updated={"a"}), True),
    "and not again": (Op.LOAD, Facts(loaded={"a"}), False),
    "nor while a graph keeps it whole": (Op.LOAD, replace(GATHERED, keeps_graph=True), False),
    "nor is it updated then": (Op.UPDATE, replace(GATHERED, keeps_graph=True), False),
    "a shard of copies is joined": (Op.UPDATE, Facts(loaded={"a"}), True),
    "once": (Op.UPDATE, Facts(updated={"a"}), False),
}


@pytest.mark.parametrize("name", DUE)
def test_an_event_is_carried_out_if_it_is_due(name: str) -> None:
    op, facts, due = DUE[name]
    assert deepcopy(facts).take(Event(op, "a", Phase.BACKWARD)) is due


# ---- facts -------------------------------------------------------------------------------------


def test_what_is_carried_out_is_a_fact() -> None:
    facts = Facts(gathered={"b"}, reducing=flying("bc"))
    done = [(Op.GATHER, "a"), (Op.FREE, "b"), (Op.REDUCE, "a"), (Op.SETTLE, "b"), (Op.UPDATE, "c")]
    for op, unit in done:
        facts.take(Event(op, unit, Phase.BACKWARD))
    expected = Facts(gathered={"a"}, reducing=flying("ca"), settled={"b"}, updated={"c"})
    assert facts == expected
    facts.take(Event(Op.STORE, "b", Phase.BACKWARD))
    assert not facts.settled


def test_what_the_device_does_not_keep_is_loaded_again_after_it_was_freed() -> None:
    for reloads in (frozenset[str](), frozenset("a")):
        facts = Facts(gathered={"a"}, loaded={"a"}, reloads=reloads)
        facts.take(Event(Op.FREE, "a", Phase.FORWARD))
        assert facts.take(Event(Op.LOAD, "a", Phase.BACKWARD)) is bool(reloads)


def test_a_pin_ends_but_for_units_of_another_pass_and_of_forward_calls_under_way() -> None:
    facts = Facts(pinned=set("abc"), forward=Counter("b"), backward=Counter("a"))
    facts.unpin(keep="c")
    assert facts.pinned == {"b", "c"}


def test_a_pass_that_stopped_leaves_only_what_is_collected_and_in_flight() -> None:
    facts = Facts(True, frozenset("a"), {"a"}, Counter("a"), Counter("a"), {"a"}, True, flying("a"))
    facts.forget_pass()
    assert facts == Facts(trained=frozenset("a"), reducing=flying("a"))


MODES = {(True, False): "train", (True, True): "last",
         (False, False): "accumulate", (False, True): "between"}  # fmt: skip


@pytest.mark.parametrize(("reduces", "collected"), MODES)
def test_the_mode_follows_from_what_is_averaged_and_what_was_collected(
    reduces: bool, collected: bool
) -> None:
    assert Facts(reduces=reduces).mode(collected) == MODES[reduces, collected]


def test_what_was_made_of_an_old_shard_expires() -> None:
    facts = Facts(updated=set("ab"), loaded=set("ab"))
    facts.expire("a")
    assert (facts.updated, facts.loaded) == ({"b"}, {"b"})
