"""The decision at a cue. Pure, like ``events``: no torch, no network, no clock.

One function decides, by what was done so far and what is known to come:

    cue                         events
    a call begins               gather its unit, and ahead of their use those that come next
    a call has ended            free its unit, if that is to be done after each use, or was the last
    the last backward call      the same, and reduce its gradients, settle the earlier reduce; a
                                hybrid's goes on over its copies, and is settled a call later
    a pass ends                 settle what is in flight; free every unit

Where an order is expected, ``steps`` plays it through beforehand. From the first cue on that was
not expected (a skipped branch, a second forward pass), the runtime asks when the cue is there, and
nothing is known to come: never wrong, only less far-sighted. Calls are counted, not graphs: how
long a graph lives may differ by rank, and every rank has to come to the same events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwise.plan.schedule.events import Cue, Event, Mode, Op, Order, Phase, Policy, UnitBytes


@dataclass
class Facts:
    """Actions so far. Whoever carries events out writes it, decisions only read it."""

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
    # The units whose gradients are on their way, the oldest first; over the copies, too?
    reducing: dict[str, bool] = field(default_factory=dict)
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

    def __post_init__(self) -> None:
        #: For each half of a step, the calls of each unit that are under way in it.
        self.calls = {Phase.FORWARD: self.forward, Phase.BACKWARD: self.backward}

    def computes(self, unit: str) -> bool:
        """Is a call of it under way?"""
        return self.forward[unit] > 0 or self.backward[unit] > 0

    def mode(self, collected: bool) -> Mode:
        """The mode of a step with gradients; ``collected``: micro-batches have left some."""
        if self.reduces:
            return "last" if collected else "train"
        return "between" if collected else "accumulate"

    def take(self, event: Event) -> bool:
        """Is an event due now? Then it counts as carried out.

        It may have happened already, or have to wait.
        """
        op, unit = event.op, event.unit
        if op is Op.GATHER:
            if unit in self.gathered:
                return False
            self.gathered.add(unit)
            return True
        if op is Op.FREE:  # unless a call, a graph, or something outside the unit reads it
            computes = self.forward[unit] > 0 or self.backward[unit] > 0
            if computes or self.keeps_graph or unit in self.pinned or unit not in self.gathered:
                return False
            self.gathered.discard(unit)
            if unit in self.reloads:
                self.expire([unit])
            return True
        if op in (Op.LOAD, Op.UPDATE):  # what a graph keeps whole shows no shard that could be read
            made = self.loaded if op is Op.LOAD else self.updated
            if unit in self.gathered or unit in made:
                return False
            made.add(unit)
            return True
        return self._take_reduced(op, unit)

    def _take_reduced(self, op: Op, unit: str) -> bool:
        if op in (Op.REDUCE, Op.AVERAGE):
            if self.reducing.get(unit, op is Op.AVERAGE):
                return False
            self.reducing[unit] = op is Op.AVERAGE
            return True
        if op is Op.STORE:
            if unit not in self.settled:
                return False
            self.settled.remove(unit)
            return True
        if unit not in self.reducing:
            return False
        del self.reducing[unit]
        self.settled.add(unit)
        return True

    def expire(self, units: Iterable[str]) -> None:
        """Mark what was made of these units' shards as old, or gone."""
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


class Upcoming(NamedTuple):
    """Knowledge at a cue of the rest of the step; by default, none."""

    use: str = "on demand"  # why the unit that is entered is gathered
    is_last: bool = False  # no other call of the cue's unit is to come
    is_next: bool = False  # of the units not around it, the one that is left computes next
    ahead: Sequence[str] = ()  # the units to be gathered ahead of their use


def decide(policy: Policy, facts: Facts, cue: Cue, upcoming: Upcoming) -> list[Event]:
    """The events of a cue, each to be carried out if it is due: before an ``ENTER``, else after."""
    op, unit, phase = cue
    if op is Op.END:
        return _end(policy, facts, phase)
    listed: list[Event] = []
    if op is Op.ENTER and policy.gathers(unit):
        listed += policy.gathering(unit, phase, upcoming.use)
    for other in upcoming.ahead:
        computes = f"while {unit or '(root)'} computes"
        when = computes if op is Op.ENTER else f"{unit or '(root)'} has computed"
        listed += policy.gathering(other, phase, f"ahead, {when}")
    return listed if op is Op.ENTER else listed + _exit(policy, facts, cue, upcoming)


def _exit(policy: Policy, facts: Facts, cue: Cue, upcoming: Upcoming) -> list[Event]:
    _, unit, phase = cue
    listed: list[Event] = []
    placement, averages = policy.placements[unit], facts.reduces and upcoming.is_last
    if (placement.frees and not upcoming.is_next) or (averages and not placement.resident):
        reason = "last use" if upcoming.is_last else "not needed soon"
        listed.append(Event(Op.FREE, unit, phase, reason))
    computed = phase is Phase.BACKWARD and not facts.backward[unit]
    if averages and computed and unit in facts.trained:
        reduced = [Event(Op.REDUCE, unit, phase, "its gradients are complete")]
        for earlier, over_copies in facts.reducing.items():
            ended = policy.settling(earlier, phase, "one reduce stays in flight")
            if over_copies:
                listed += ended  # first: it gives its memory back
            else:
                reduced += [next(ended)] if earlier in policy.averages else ended
        listed += reduced
    return listed


def _end(policy: Policy, facts: Facts, phase: Phase) -> list[Event]:
    """Between micro-batches nothing changes the parameters, so only ``frees`` lets them go."""
    listed: list[Event] = []
    for unit in facts.reducing if phase is Phase.BACKWARD else ():
        listed += policy.settling(unit, phase, "the optimizer may run next")
    for unit in sorted(facts.gathered):  # in one order on every rank
        if facts.reduces or phase is Phase.FORWARD or policy.placements[unit].frees:
            listed.append(Event(Op.FREE, unit, phase, "the step is over"))
    return listed


# ---- a whole step ------------------------------------------------------------------------------


class Step(NamedTuple):
    """A cue, with what is carried out when it comes: before an ``ENTER``, else after it."""

    cue: Cue
    events: tuple[Event, ...]

    def in_order(self) -> tuple[Event, ...]:
        """The events and the cue, as they come."""
        cue = Event(*self.cue)
        return (*self.events, cue) if cue.op is Op.ENTER else (cue, *self.events)


def events(
    order: Order, policy: Policy, nbytes: Mapping[str, UnitBytes], mode: Mode = "train"
) -> tuple[Event, ...]:
    """One step: the cues in order, every gather, free, reduce and settle between them, ``END``."""
    return tuple(event for step in steps(order, policy, nbytes, mode) for event in step.in_order())


def steps(
    order: Order, policy: Policy, nbytes: Mapping[str, UnitBytes], mode: Mode = "train"
) -> tuple[Step, ...]:
    """The same, for each cue: a step is decided cue by cue, as if it ran."""
    end = Cue(Op.END, "", Phase.BACKWARD if order.backward else Phase.FORWARD)
    cues = (*order.forward, *order.backward, end)
    trained = frozenset(unit for unit, taken in nbytes.items() if taken.gradients)
    facts, expected = _at_start(policy, mode, trained, order), _Expected(cues, policy, nbytes)
    played: list[Step] = []
    for position, cue in enumerate(cues):
        facts.calls[cue.phase][cue.unit] -= cue.op is Op.EXIT
        listed = decide(policy, facts, cue, expected.after(position, facts))
        due = tuple(event for event in listed if facts.take(event))
        facts.calls[cue.phase][cue.unit] += cue.op is Op.ENTER
        played.append(Step(cue, due))
    return tuple(played)


def _at_start(policy: Policy, mode: Mode, trained: frozenset[str], order: Order) -> Facts:
    """Return what was done when a step begins."""
    facts = Facts(mode in ("train", "last"), trained, reloads=policy.reloads)
    if mode in ("between", "last"):  # what was not freed is there; no optimizer has stepped since
        facts.gathered.update(policy.left_whole(order))
        facts.loaded |= policy.loads - policy.reloads
        facts.updated |= policy.joins - policy.reloads
    return facts


class _Expected:
    """The cues of a step, and what is to come after each of them.

    The prefetch rules follow PyTorch FSDP (Zhao et al. 2023, arXiv 2304.11277, §3.3.2–3.4); depth
    is in bytes, not in units, because units differ in size. A model that deviates at every step
    has its steps decided anew at every step, so nothing here searches through all cues.
    """

    def __init__(
        self, cues: Sequence[Cue], policy: Policy, nbytes: Mapping[str, UnitBytes]
    ) -> None:
        self.cues, self.policy, self.nbytes = cues, policy, nbytes
        prefetch = policy.prefetch
        each = [unit.gathered for unit in nbytes.values()]
        # What is resident takes no more memory where it is gathered early.
        resident = all(policy.placements[unit].resident for unit in nbytes)
        default = sum(each) if resident else max(each, default=0)
        depths = {Phase.FORWARD: prefetch.forward, Phase.BACKWARD: prefetch.backward}
        self.depths = {p: default if depth is None else depth for p, depth in depths.items()}
        self.ahead, self.ahead_bytes = set[str](), 0  # gathered, not entered yet
        self.known = 0  # every unit that is entered from here to there is gathered
        #: For each cue, where its unit is entered next, and where any is.
        self.next_use, self.next_enter = list[int | None](), list[int | None]()
        self.first_use: dict[str, int] = {}
        enter = None
        for position in reversed(range(len(cues))):
            self.next_use.append(self.first_use.get(cues[position].unit))
            self.next_enter.append(enter)
            if cues[position].op is Op.ENTER:
                self.first_use[cues[position].unit] = enter = position
        self.next_use.reverse()
        self.next_enter.reverse()

    def after(self, position: int, facts: Facts) -> Upcoming:
        """Return what is to come after this cue."""
        cue, again = self.cues[position], self.next_use[position]
        use = "first use" if self.first_use.get(cue.unit) == position else "needed again"
        ahead = self._gathered_ahead(position, facts)
        if cue.op is not Op.EXIT or again is None:
            return Upcoming(use, again is None, False, ahead)
        self.known = min(self.known, again)  # it may be freed
        following = self.next_enter[position]
        while following is not None and facts.computes(self.cues[following].unit):
            following = self.next_enter[following]
        return Upcoming(use, False, following == again, ahead)

    def _gathered_ahead(self, position: int, facts: Facts) -> list[str]:
        (op, unit, phase), prefetch = self.cues[position], self.policy.prefetch
        flies = False  # is the cue's own unit gathered, and not entered yet?
        if op is Op.ENTER:
            if flies := unit in self.ahead:  # used now, so not ahead of its use
                self.ahead.remove(unit)
                self.ahead_bytes -= self.nbytes[unit].gathered
            flies = flies or (self.policy.gathers(unit) and unit not in facts.gathered)
        units: list[str] = []
        if op is not (Op.EXIT if (phase, prefetch.when) == (Phase.BACKWARD, "post") else Op.ENTER):
            return units
        while prefetch.limit is None or len(self.ahead) + flies < prefetch.limit:
            if (wanted := self._first_to_gather(position, facts)) is None:
                break
            nbytes = self.nbytes[wanted].gathered
            if self.ahead_bytes + nbytes > self.depths[phase]:
                break
            units.append(wanted)
            self.ahead.add(wanted)
            self.ahead_bytes += nbytes
        return units

    def _first_to_gather(self, position: int, facts: Facts) -> str | None:
        """The first unit that is used after ``position``, in the same phase, and not gathered."""
        place = self.known if self.known > position else self.next_enter[position]
        while place is not None and self.cues[place].phase is self.cues[position].phase:
            unit, self.known = self.cues[place].unit, place
            gathered = unit in facts.gathered or unit in self.ahead
            if not gathered and unit != self.cues[position].unit and self.policy.gathers(unit):
                return unit
            place = self.next_enter[place]
        return None
