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

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple

from shardwise.arguments import checked
from shardwise.errors import ConfigError
from shardwise.schedule.placement import Placement

__all__ = [
    "Cue",
    "Event",
    "Mode",
    "Op",
    "Order",
    "Phase",
    "Policy",
    "Prefetch",
    "UnitBytes",
    "events",
]


Mode = str
"""``"train"``; ``"accumulate"`` and ``"last"`` micro-batch; ``"forward"`` without gradients."""


class Op(StrEnum):
    """What an event does. The first three are cues: the user's code triggers them."""

    ENTER = "enter"
    EXIT = "exit"
    END = "end"  # the step is over: the forward pass without gradients, or the backward pass
    UPDATE = "update"  # join what the optimizers of a shard's copies have written, once per step
    GATHER = "gather"
    LOAD = "load"  # copy a shard from host memory to the device
    FREE = "free"
    REDUCE = "reduce"
    SETTLE = "settle"  # wait for a reduce, hand its result over, release the gradient bucket
    STORE = "store"  # copy what was reduced to host memory, release it on the device


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


class UnitBytes(NamedTuple):
    """What a unit takes, in bytes."""

    gathered: int  # its parameters, as computed in
    gradients: int  # what travels to be summed; 0 if it is frozen
    spread: int = 0  # of the mean gradients, as stored, what copies send each other
    joined: int = 0  # of what is gathered, what copies join first
    gather_sent: int = 0  # by one rank
    update_sent: int = 0
    reduce_sent: int = 0
    loaded: int = 0  # what this rank loads from host memory; 0 if it rests on the device
    stored: int = 0  # what this rank stores there of its gradients
    kept_sent: int = 0  # of ``gather_sent``, what is frozen and stays: only in the first step


@checked
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
    when: Literal["pre", "post"] = "pre"
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(
                f"prefetch.limit is {self.limit}; at least 1 gather must be allowed in flight."
            )


@dataclass(frozen=True)
class Policy:
    """Everything besides the order that a schedule depends on.

    Where computing needs another dtype than is stored (``casts``), even whole parameters are
    "gathered": cast, and nothing is sent.
    """

    placements: Mapping[str, Placement]  # by unit
    prefetch: Prefetch = Prefetch()
    reduces: bool = True  # gradients leave the rank in this step (not while accumulating)
    casts: bool = False
    gathered_at_start: frozenset[str] = frozenset()  # when the step begins
    joins: frozenset[str] = frozenset()  # units of whose shards each copy updates a piece
    updates: bool = True  # optimizers may have stepped since shards were read last
    loads: frozenset[str] = frozenset()  # units whose shards are in host memory
    reloads: frozenset[str] = frozenset()  # of them, those of which the device keeps nothing
    stores: frozenset[str] = frozenset()  # units whose gradients go to host memory

    def of_mode(self, mode: Mode) -> Policy:
        """The same for one mode of a step."""
        stay = frozenset(unit for unit, placement in self.placements.items() if not placement.frees)
        return replace(
            self,
            reduces=mode != "accumulate",
            gathered_at_start=stay if mode == "last" else frozenset[str](),
            updates=mode != "last",
        )

    def gathers(self, unit: str) -> bool:
        """Is the unit at rest something else than what it computes with?"""
        return self.placements[unit].splits or self.casts or unit in self.loads

    def gathering(self, unit: str, phase: Phase, reason: str) -> Iterator[Event]:
        """What gathers a unit; what was done in this step already is not done again."""
        if unit in self.loads:
            again = "nothing of it is kept" if unit in self.reloads else "the optimizer has stepped"
            yield Event(Op.LOAD, unit, phase, again)
        if unit in self.joins:
            yield Event(Op.UPDATE, unit, phase, "the optimizers of its copies have stepped")
        yield Event(Op.GATHER, unit, phase, reason)

    def settling(self, unit: str, phase: Phase, reason: str) -> Iterator[Event]:
        """What ends a reduce."""
        yield Event(Op.SETTLE, unit, phase, reason)
        if unit in self.stores:
            yield Event(Op.STORE, unit, phase, reason)


@dataclass
class _Writer:
    """The list while it grows, and what is gathered at its end.

    A model that deviates at every step has its schedule built at every step, so no question is
    answered by a search through the cues: where each unit is used next is known beforehand, and
    two heaps hold the next uses of the units that are not gathered and of those that are not open.
    """

    cues: tuple[Cue, ...]
    policy: Policy
    nbytes: Mapping[str, UnitBytes]
    events: list[Event] = field(default_factory=list)
    gathered: set[str] = field(default_factory=set)
    ahead: set[str] = field(default_factory=set)  # gathered, not entered yet
    ahead_bytes: int = 0
    open: Counter[str] = field(default_factory=Counter)  # entered, not left yet
    reducing: list[str] = field(default_factory=list)
    updated: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.next_use, self.first_use = _uses(self.cues)
        # Positions of cues. One that is past, or whose unit is gathered by now, is stale.
        self.not_open = list(self.first_use.values())
        first_use = self.first_use.items()
        self.not_gathered = [at for unit, at in first_use if self.policy.gathers(unit)]
        heapify(self.not_open)
        heapify(self.not_gathered)

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest unit."""
        return max(unit.gathered for unit in self.nbytes.values())

    def add(self, op: Op, unit: str, phase: Phase, reason: str) -> None:
        self.events.append(Event(op, unit, phase, reason))

    def gather(self, unit: str, phase: Phase, reason: str) -> None:
        self.gathered.add(unit)
        self.ahead.add(unit)
        self.ahead_bytes += self.nbytes[unit].gathered
        listed = self.policy.gathering(unit, phase, reason)
        is_kept = not self.policy.updates and unit not in self.policy.reloads
        is_updated = unit in self.updated or is_kept
        self.events += [event for event in listed if event.op is Op.GATHER or not is_updated]
        self.updated.add(unit)

    def free(self, unit: str, again: int | None, phase: Phase, reason: str) -> None:
        self.gathered.discard(unit)
        if unit in self.policy.reloads:
            self.updated.discard(unit)
        if again is not None:
            heappush(self.not_gathered, again)
        self.add(Op.FREE, unit, phase, reason)

    def settle(self, keep: int, phase: Phase, reason: str) -> None:
        while len(self.reducing) > keep:
            self.events += self.policy.settling(self.reducing.pop(0), phase, reason)


def _uses(cues: Sequence[Cue]) -> tuple[list[int | None], dict[str, int]]:
    """For each cue, where its unit is entered next; and for each unit, where it is first."""
    upcoming: dict[str, int] = {}
    next_use: list[int | None] = [None] * len(cues)
    for position in reversed(range(len(cues))):
        cue = cues[position]
        next_use[position] = upcoming.get(cue.unit)
        if cue.op is Op.ENTER:
            upcoming[cue.unit] = position
    return next_use, upcoming


def events(order: Order, policy: Policy, nbytes: Mapping[str, UnitBytes]) -> tuple[Event, ...]:
    """One step: the cues in order, every gather, free, reduce and settle between them, ``END``."""
    end = Cue(Op.END, "", Phase.BACKWARD if order.backward else Phase.FORWARD)
    cues = (*order.forward, *order.backward, end)
    writer = _Writer(cues, policy, nbytes, gathered=set(policy.gathered_at_start))
    for position, cue in enumerate(cues):
        if cue.op is Op.ENTER:
            _enter(writer, position, cue)
        elif cue.op is Op.EXIT:
            _exit(writer, position, cue)
        else:
            _end(writer, cue)
    return tuple(writer.events)


def _enter(writer: _Writer, position: int, cue: Cue) -> None:
    if writer.policy.gathers(cue.unit) and cue.unit not in writer.gathered:
        first = position == writer.first_use[cue.unit]
        writer.gather(cue.unit, cue.phase, "first use" if first else "needed again")
    if cue.phase is Phase.FORWARD or writer.policy.prefetch.when == "pre":
        _prefetch(writer, position, f"ahead, while {cue.unit or '(root)'} computes")
    writer.events.append(Event(*cue))
    writer.open[cue.unit] += 1
    if cue.unit in writer.ahead:
        writer.ahead.remove(cue.unit)
        writer.ahead_bytes -= writer.nbytes[cue.unit].gathered


def _exit(writer: _Writer, position: int, cue: Cue) -> None:
    again = writer.next_use[position]
    writer.events.append(Event(*cue))
    writer.open[cue.unit] -= 1
    if cue.phase is Phase.BACKWARD and writer.policy.prefetch.when == "post":
        _prefetch(writer, position, f"ahead, {cue.unit or '(root)'} has computed")
    if writer.open[cue.unit]:
        return
    if again is not None:
        heappush(writer.not_open, again)
    if _releases(writer, position, cue):
        reason = "last use" if again is None else "not needed soon"
        writer.free(cue.unit, again, cue.phase, reason)
    if _is_reduced(writer, cue) and again is None:
        writer.reducing.append(cue.unit)
        writer.add(Op.REDUCE, cue.unit, cue.phase, "its gradients are complete")
        writer.settle(1, cue.phase, "one reduce stays in flight")


def _end(writer: _Writer, cue: Cue) -> None:
    writer.events.append(Event(*cue))
    writer.settle(0, cue.phase, "the optimizer may run next")
    for unit in sorted(writer.gathered):
        if not _stays_gathered(writer.policy, unit):
            writer.free(unit, None, cue.phase, "the step is over")


def _stays_gathered(policy: Policy, unit: str) -> bool:
    """Between micro-batches nothing changes the parameters, so only ``frees`` lets them go."""
    frees = policy.reduces or policy.placements[unit].frees
    return not (policy.gathers(unit) and frees)


def _prefetch(writer: _Writer, position: int, reason: str) -> None:
    prefetch, cue = writer.policy.prefetch, writer.cues[position]
    budget = prefetch.forward if cue.phase is Phase.FORWARD else prefetch.backward
    budget = writer.largest if budget is None else budget
    if cue.unit in writer.ahead:  # used now, so not ahead of its use
        budget += writer.nbytes[cue.unit].gathered
    while (wanted := _first_to_gather(writer, position)) is not None:
        if wanted.phase is not cue.phase:
            return
        if writer.ahead_bytes + writer.nbytes[wanted.unit].gathered > budget:
            return
        if prefetch.limit is not None and len(writer.ahead) >= prefetch.limit:
            return
        writer.gather(wanted.unit, cue.phase, reason)


def _first_to_gather(writer: _Writer, position: int) -> Cue | None:
    """The first use after ``position`` of a unit that is not gathered."""
    while writer.not_gathered:
        at = writer.not_gathered[0]
        if at > position and writer.cues[at].unit not in writer.gathered:
            return writer.cues[at]
        heappop(writer.not_gathered)
    return None


def _releases(writer: _Writer, position: int, cue: Cue) -> bool:
    policy, placement = writer.policy, writer.policy.placements[cue.unit]
    if placement.resident:
        return False
    if not placement.frees:
        return policy.reduces and writer.next_use[position] is None
    return not _comes_next(writer, position)


def _comes_next(writer: _Writer, position: int) -> bool:
    """Is the unit that is left at ``position`` the next to compute, besides those around it?"""
    while writer.not_open and writer.not_open[0] <= position:
        heappop(writer.not_open)
    return bool(writer.not_open) and writer.not_open[0] == writer.next_use[position]


def _is_reduced(writer: _Writer, cue: Cue) -> bool:
    if cue.phase is Phase.FORWARD or not writer.policy.reduces:
        return False
    return bool(writer.nbytes[cue.unit].gradients)
