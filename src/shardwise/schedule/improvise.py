"""What is done where no schedule says it. Pure, like ``events``: no torch, no network, no clock.

A step may deviate from its schedule: a branch is skipped, a unit is called twice, a second forward
pass comes before the backward pass. From the first cue that was not expected to the end of the
pass, events come from here:

    cue                         events
    a call begins               gather its unit (after a schedule's own events, too)
    a forward call has ended    free its unit, if the strategy frees after each use
    a backward call has ended   the same; after the last one of its unit in this step:
                                free the unit, reduce its gradients, settle earlier reduces
    a backward pass ends        reduce and settle what is left; free every unit

That is never wrong, only less far-sighted than a schedule. Calls are counted, not graphs: how long
a graph lives may differ by rank, and every rank has to come to the same events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwise.schedule.events import Cue, Event, Mode, Op, Phase, Policy

__all__ = ["Facts", "end_events", "improvise", "is_due", "reduces_left_over", "released"]


@dataclass
class Facts:
    """What this rank has done so far. The runtime writes it, decisions only read it."""

    # Are gradients averaged at the end of this backward pass? ``accumulate()`` sets it.
    reduces: bool = True
    # The units with a parameter that is trained.
    trained: frozenset[str] = frozenset()
    # The units whose parameters are whole, or on their way.
    gathered: set[str] = field(default_factory=set)
    # For each unit, its calls whose forward pass, or recomputation, is under way.
    forward: Counter[str] = field(default_factory=Counter)
    # For each unit, its calls whose backward pass is under way.
    backward: Counter[str] = field(default_factory=Counter)
    # The units whose memory is read from outside until the step is over.
    pinned: set[str] = field(default_factory=set)
    # Does a graph made by ``create_graph=True`` wait for another backward pass?
    keeps_graph: bool = False
    # The units whose gradients are on their way, the oldest first.
    reducing: list[str] = field(default_factory=list)
    # The units whose shards hold what the optimizers of all copies have written.
    updated: set[str] = field(default_factory=set)
    # The units whose shards in host memory are on the device, too.
    loaded: set[str] = field(default_factory=set)
    # Of them, those that are not when they are freed.
    reloads: frozenset[str] = frozenset()
    # The units whose mean gradients are on the device, and go to host memory next.
    settled: set[str] = field(default_factory=set)
    # The units that were whole when a backward pass of this step began, and those of them that
    # were pinned.
    left_whole: set[str] = field(default_factory=set)
    left_pinned: set[str] = field(default_factory=set)

    def in_use(self, unit: str) -> bool:
        """Does a call, a graph, or something outside the unit read its parameters?"""
        computing = self.forward[unit] > 0 or self.backward[unit] > 0
        return computing or self.keeps_graph or unit in self.pinned

    def mode(self, collected: bool) -> Mode:
        """The mode of a step with gradients; ``collected``: micro-batches have left some."""
        if not self.reduces:
            return "accumulate"
        return "last" if collected else "train"

    def note(self, event: Event) -> None:
        """An event is carried out now."""
        op, unit = event.op, event.unit
        if op is Op.GATHER:
            self.gathered.add(unit)
        elif op is Op.FREE:
            self.gathered.discard(unit)
            if unit in self.reloads:
                self.expire([unit])
        elif op is Op.REDUCE:
            self.reducing.append(unit)
        elif op is Op.SETTLE:
            self.reducing.remove(unit)
            self.settled.add(unit)
        elif op is Op.STORE:
            self.settled.remove(unit)
        else:
            (self.loaded if op is Op.LOAD else self.updated).add(unit)

    def note_left(self) -> None:
        """A backward pass begins."""
        self.left_whole |= self.gathered
        self.left_pinned |= self.pinned

    def forget_left(self) -> None:
        """The step is over: a graph of it has no backward pass any more."""
        self.left_whole.clear()
        self.left_pinned.clear()

    def expire(self, units: Iterable[str]) -> None:
        """What was made of these units' shards is old, or gone."""
        self.updated.difference_update(units)
        self.loaded.difference_update(units)

    def unpin(self, keep: Iterable[str]) -> None:
        """Pins end, but for those of units in ``keep`` and of forward calls under way."""
        self.pinned = {unit for unit in self.pinned if self.forward[unit] > 0 or unit in keep}

    def forget_pass(self) -> None:
        """A pass has stopped: nothing is gathered, and nothing is under way."""
        for units in (self.gathered, self.forward, self.backward, self.pinned):
            units.clear()
        for kept in (self.updated, self.loaded, self.settled):
            kept.clear()
        self.keeps_graph = False


def is_due(event: Event, facts: Facts) -> bool:
    """Is an event to be carried out now? It may have happened already, or have to wait."""
    op, unit = event.op, event.unit
    if op is Op.GATHER:
        return unit not in facts.gathered
    if op is Op.FREE:
        return unit in facts.gathered and not facts.in_use(unit)
    if op in (Op.LOAD, Op.UPDATE):  # what a graph keeps whole shows no shard that could be read
        made = facts.loaded if op is Op.LOAD else facts.updated
        return unit not in facts.gathered and unit not in made
    if op is Op.STORE:
        return unit in facts.settled
    return op is Op.REDUCE or unit in facts.reducing


def improvise(policy: Policy, facts: Facts, cue: Cue, last: bool) -> list[Event]:
    """What is done at a cue that no schedule foresees: before an ``ENTER``, and after an ``EXIT``.

    ``last``: no other backward pass of a call of the cue's unit is to come in this step.
    """
    op, unit, phase = cue
    if op is not Op.EXIT:
        return list(policy.gathering(unit, phase, "on demand")) if op is Op.ENTER else []
    averages = last and phase is Phase.BACKWARD and facts.reduces
    listed: list[Event] = []
    placement = policy.placements[unit]
    if placement.frees or (averages and not placement.resident):
        listed.append(Event(Op.FREE, unit, phase, "on demand"))
    if averages and unit in facts.trained:
        listed.append(Event(Op.REDUCE, unit, phase, "on demand"))
        for earlier in facts.reducing:
            listed += policy.settling(earlier, phase, "on demand")
    return listed


# ---- a whole pass ------------------------------------------------------------------------------


def reduces_left_over(facts: Facts, collected: Iterable[str]) -> list[Event]:
    """Before a backward pass ends: reduce what was ``collected`` and is not on its way."""
    left = [unit for unit in collected if facts.reduces and unit not in facts.reducing]
    return [Event(Op.REDUCE, unit, Phase.BACKWARD, "left over") for unit in left]


def released(policy: Policy, facts: Facts, units: Iterable[str]) -> list[str]:
    """The units freed after a backward pass. Between micro-batches the others are used again."""
    return [unit for unit in units if facts.reduces or policy.placements[unit].frees]


def end_events(policy: Policy, facts: Facts, freed: Iterable[str], phase: Phase) -> list[Event]:
    """After the end of a pass: settle every reduce in flight, then free these units."""
    listed: list[Event] = []
    for unit in facts.reducing if phase is Phase.BACKWARD else ():
        listed += policy.settling(unit, phase, "left over")
    whole = [unit for unit in freed if unit in facts.gathered]
    return listed + [Event(Op.FREE, unit, phase, "the step is over") for unit in whole]
