"""One step as a list of events. Pure: no torch, no network, no clock.

The ordinary way scatters the order of a step over hooks and flags, so a planner has to
imitate it and a test has to patch it. Here the order is a value: the runtime carries it
out, the planner weighs it, the trace prints it, the tests read it as a table.

    cues (what the user's code does)          events (what we add)
    enter root                                gather root
      enter blocks.0   exit blocks.0          gather blocks.0 … free blocks.0
      enter blocks.1   exit blocks.1          gather blocks.1 … free blocks.1
    exit root
    … and back again, where an exit also reduces, and a settle ends what a reduce began

The prefetch rules follow PyTorch FSDP (Zhao et al. 2023, arXiv 2304.11277, §3.3.2–3.4); depth is
in bytes, not in units, because units differ in size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from shardwise.errors import ConfigError
from shardwise.strategies import Placement

__all__ = [
    "Cue",
    "Event",
    "Op",
    "Order",
    "Phase",
    "Policy",
    "Prefetch",
    "Weight",
    "events",
]


class Op(StrEnum):
    """What an event does. The first three are cues: the user's code triggers them."""

    ENTER = "enter"
    EXIT = "exit"
    END = "end"  # the step is over: the forward pass without gradients, or the backward pass
    GATHER = "gather"
    FREE = "free"
    REDUCE = "reduce"
    SETTLE = "settle"  # wait for a reduce, hand its result over, release the gradient bucket


CUES = frozenset({Op.ENTER, Op.EXIT, Op.END})


class Phase(StrEnum):
    """Which half of a step an event lies in."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Cue(NamedTuple):
    """A module of ``unit`` begins or ends computing. ``END`` has no unit."""

    op: Op
    unit: str
    phase: Phase


class Event(NamedTuple):
    """One entry of the schedule. ``reason`` is for people."""

    op: Op
    unit: str
    phase: Phase
    reason: str = ""


class Order(NamedTuple):
    """The cues of one step. ``backward`` is empty where no gradients are computed."""

    forward: tuple[Cue, ...]
    backward: tuple[Cue, ...] = ()


class Weight(NamedTuple):
    """What a unit weighs, in bytes.

    Attributes:
        gathered: its parameters, as computed in.
        gradients: those of its gradients that travel to be summed; 0 if it is frozen.
        mean: the same gradients, summed, as stored.
    """

    gathered: int
    gradients: int
    mean: int = 0


@dataclass(frozen=True)
class Prefetch:
    """How far ahead of their use units are gathered.

    Attributes:
        forward: bytes gathered ahead in the forward pass; ``None`` = the largest unit, 0 = off.
        backward: the same in the backward pass.
        when: ``"pre"``: the next gather is issued before this unit's gradients are computed
            (BACKWARD_PRE); ``"post"``: after, before its reduce (BACKWARD_POST).
        limit: gathers in flight at most (``limit_all_gathers``); ``None`` = no limit.
    """

    forward: int | None = None
    backward: int | None = None
    when: str = "pre"
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.when not in ("pre", "post"):
            raise ConfigError(
                f"prefetch.when is {self.when!r}; it can be 'pre' (BACKWARD_PRE) or 'post' "
                "(BACKWARD_POST). For no backward prefetch set prefetch.backward=0."
            )
        if self.limit is not None and self.limit < 1:
            raise ConfigError(
                f"prefetch.limit is {self.limit}; at least 1 gather must be allowed in flight."
            )


@dataclass(frozen=True)
class Policy:
    """Everything besides the order that a schedule depends on.

    Attributes:
        placement: the strategy.
        prefetch: how far ahead units are gathered.
        reduces: gradients leave the rank in this step (``False`` while accumulating).
        casts: computing needs another dtype than is stored, so even whole parameters are
            "gathered" (cast; nothing is sent).
        held: units that are gathered when the step begins.
        kept: units that stay gathered between their forward and backward use under a placement
            that frees; ``None`` = those that would be gathered again at once.
    """

    placement: Placement
    prefetch: Prefetch = Prefetch()
    reduces: bool = True
    casts: bool = False
    held: frozenset[str] = frozenset()
    kept: frozenset[str] | None = None

    @property
    def gathers(self) -> bool:
        """Is a unit at rest something else than what it computes with?"""
        return self.placement.splits or self.casts


@dataclass
class _Writer:
    """The list while it grows, and what is gathered at its end."""

    cues: tuple[Cue, ...]
    policy: Policy
    weights: Mapping[str, Weight]
    events: list[Event] = field(default_factory=list)
    gathered: set[str] = field(default_factory=set)
    ahead: list[str] = field(default_factory=list)  # gathered, not entered yet
    open: list[str] = field(default_factory=list)  # entered, not left yet
    reducing: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def add(self, op: Op, unit: str, phase: Phase, reason: str) -> None:
        self.events.append(Event(op, unit, phase, reason))

    def gather(self, unit: str, phase: Phase, reason: str) -> None:
        self.gathered.add(unit)
        self.ahead.append(unit)
        self.add(Op.GATHER, unit, phase, reason)

    def free(self, unit: str, phase: Phase, reason: str) -> None:
        self.gathered.discard(unit)
        self.add(Op.FREE, unit, phase, reason)

    def settle(self, keep: int, phase: Phase, reason: str) -> None:
        while len(self.reducing) > keep:
            self.add(Op.SETTLE, self.reducing.pop(0), phase, reason)


def events(order: Order, policy: Policy, weights: Mapping[str, Weight]) -> tuple[Event, ...]:
    """One step as a list.

    Args:
        order: the cues, forward and backward.
        policy: placement, prefetch and mode.
        weights: what each unit weighs, by name.

    Returns:
        The cues in their order, with every gather, free, reduce and settle between them, and
        ``END`` last.
    """
    end = Cue(Op.END, "", Phase.BACKWARD if order.backward else Phase.FORWARD)
    cues = (*order.forward, *order.backward, end)
    writer = _Writer(cues, policy, weights, gathered=set(policy.held))
    for position, cue in enumerate(cues):
        if cue.op is Op.ENTER:
            _enter(writer, position, cue)
        elif cue.op is Op.EXIT:
            _exit(writer, position, cue)
        else:
            _end(writer, cue)
    return tuple(writer.events)


def _enter(writer: _Writer, position: int, cue: Cue) -> None:
    if writer.policy.gathers and cue.unit not in writer.gathered:
        again = cue.unit in writer.used
        writer.gather(cue.unit, cue.phase, "needed again" if again else "first use")
    if cue.phase is Phase.FORWARD or writer.policy.prefetch.when == "pre":
        _prefetch(writer, position, f"ahead, while {cue.unit or '(root)'} computes")
    writer.events.append(Event(*cue))
    writer.used.add(cue.unit)
    writer.open.append(cue.unit)
    if cue.unit in writer.ahead:
        writer.ahead.remove(cue.unit)


def _exit(writer: _Writer, position: int, cue: Cue) -> None:
    writer.events.append(Event(*cue))
    writer.open.remove(cue.unit)
    if cue.phase is Phase.BACKWARD and writer.policy.prefetch.when == "post":
        _prefetch(writer, position, f"ahead, {cue.unit or '(root)'} has computed")
    if cue.unit not in writer.open and _releases(writer, position, cue):
        last = not _comes_again(writer, position, cue.unit)
        writer.free(cue.unit, cue.phase, "last use" if last else "not needed soon")
    if _is_last_backward(writer, position, cue):
        writer.reducing.append(cue.unit)
        writer.add(Op.REDUCE, cue.unit, cue.phase, "its gradients are complete")
        writer.settle(1, cue.phase, "one reduce stays in flight")


def _end(writer: _Writer, cue: Cue) -> None:
    writer.events.append(Event(*cue))
    writer.settle(0, cue.phase, "the optimizer may run next")
    if not _stays_gathered(writer.policy):
        for unit in sorted(writer.gathered):
            writer.free(unit, cue.phase, "the step is over")


def _stays_gathered(policy: Policy) -> bool:
    """Between micro-batches nothing changes the parameters, so only ``frees`` lets them go."""
    return not policy.gathers or (not policy.reduces and not policy.placement.frees)


def _prefetch(writer: _Writer, position: int, reason: str) -> None:
    prefetch, phase = writer.policy.prefetch, writer.cues[position].phase
    budget = prefetch.forward if phase is Phase.FORWARD else prefetch.backward
    if not writer.policy.gathers or budget == 0:
        return
    if budget is None:
        budget = max((weight.gathered for weight in writer.weights.values()), default=0)
    for cue in writer.cues[position + 1 :]:
        if cue.phase is not phase:
            return
        if cue.op is not Op.ENTER or cue.unit in writer.gathered:
            continue
        mine = writer.cues[position].unit  # used now, so not ahead of its use
        ahead = sum(writer.weights[unit].gathered for unit in writer.ahead if unit != mine)
        if ahead + writer.weights[cue.unit].gathered > budget:
            return
        if prefetch.limit is not None and len(writer.ahead) >= prefetch.limit:
            return
        writer.gather(cue.unit, phase, reason)


def _releases(writer: _Writer, position: int, cue: Cue) -> bool:
    policy, placement = writer.policy, writer.policy.placement
    if not policy.gathers or placement.resident or cue.unit not in writer.gathered:
        return False
    if not placement.frees:
        return policy.reduces and not _comes_again(writer, position, cue.unit)
    if policy.kept is None or not _crosses(writer, position, cue):
        return not _comes_next(writer, position, cue.unit)
    return cue.unit not in policy.kept


def _crosses(writer: _Writer, position: int, cue: Cue) -> bool:
    """Is this the unit's last forward use before a backward one?"""
    later = [
        c.phase for c in writer.cues[position + 1 :] if c.unit == cue.unit and c.op is Op.ENTER
    ]
    return cue.phase is Phase.FORWARD and bool(later) and later[0] is Phase.BACKWARD


def _comes_again(writer: _Writer, position: int, unit: str) -> bool:
    return any(c.op is Op.ENTER and c.unit == unit for c in writer.cues[position + 1 :])


def _comes_next(writer: _Writer, position: int, unit: str) -> bool:
    """Is ``unit`` the next to compute, besides those around it?"""
    for cue in writer.cues[position + 1 :]:
        if cue.op is Op.ENTER and cue.unit == unit:
            return True
        if cue.op is Op.ENTER and cue.unit not in writer.open:
            return False
    return False


def _is_last_backward(writer: _Writer, position: int, cue: Cue) -> bool:
    if cue.phase is Phase.FORWARD or not writer.policy.reduces or cue.unit in writer.open:
        return False
    return writer.weights[cue.unit].gradients > 0 and not _comes_again(writer, position, cue.unit)
