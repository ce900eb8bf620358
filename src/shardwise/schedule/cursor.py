"""A place in a schedule: what comes next, and what really happened on the way.

The runtime asks the cursor about each cue. From the first surprise on the cursor has no answer,
and the runtime improvises. The cursor records what happens, which is the next step's order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from shardwise.errors import ScheduleError
from shardwise.schedule.events import CUES, Cue, Event, Mode, Op, Order, Phase

__all__ = ["Cursor", "Step", "steps"]

GATHERING = (Op.LOAD, Op.UPDATE, Op.GATHER)


class Step(NamedTuple):
    """A cue, with what is carried out when it comes: ``before`` it, and ``after`` it."""

    cue: Cue
    before: tuple[Event, ...]
    after: tuple[Event, ...]


def steps(listed: Sequence[Event]) -> tuple[Step, ...]:
    """Cut a schedule at its cues.

    What a cue releases is carried out right after it; gathers that come later in the list wait
    for the next cue, so that nothing is gathered for a backward pass that never comes.
    """
    cut: list[Step] = []
    between: list[Event] = []
    for event in listed:
        if event.op not in CUES:
            between.append(event)
            continue
        released = _last_release(between) if cut else 0
        if cut:
            cut[-1] = cut[-1]._replace(after=tuple(between[:released]))
        cut.append(Step(Cue(event.op, event.unit, event.phase), tuple(between[released:]), ()))
        between = []
    if cut:
        cut[-1] = cut[-1]._replace(after=tuple(between))
    return tuple(cut)


def _last_release(between: Sequence[Event]) -> int:
    return max(
        (i + 1 for i, event in enumerate(between) if event.op not in GATHERING),
        default=0,
    )


class Cursor:
    """A place in one mode's schedule, and what really happened on the way.

    Args:
        participates: other ranks may have other cues, so this one carries out every event of the
            schedule, in its order, and no other. At a cue it carries out what is listed before it.
            It stays where it is at a cue that is listed nowhere later, at an ``EXIT`` of the
            forward pass, since its unit may be called again, and before the last ``EXIT`` of a
            unit in the backward pass while other calls of it on this rank are still to come back:

                schedule       enter a  exit a  enter b  exit b    enter b  exit b  enter a  exit a
                calls a, a, b  exit a comes with enter b           exit a comes with the first a
                calls a, b, a  nothing comes with the second a     nothing comes with the second a
    """

    def __init__(self, mode: Mode, script: tuple[Step, ...], participates: bool = False) -> None:
        self.mode, self._script, self._at = mode, script, 0
        self.improvised, self.ended = not script, not script
        self._seen: list[Cue] = []
        self._counts: dict[Cue, int] = defaultdict(int)
        self._participates = participates
        self._places: dict[Cue, list[int]] = defaultdict(list)  # in the schedule
        for at, step in enumerate(script if participates else ()):
            self._places[step.cue].append(at)

    @property
    def _next(self) -> Cue | None:
        known = not self.improvised and self._at < len(self._script)
        return self._script[self._at].cue if known else None

    def lists_forward(self, mode: Mode, first: str | None) -> bool:
        """Does a step in ``mode`` go on with another forward pass here, of unit ``first``?

        A root may have no unit to tell by: then any unit may be next. A rank that participates
        goes on with its schedule whatever it calls.
        """
        if mode != self.mode or self._next is None:
            return False
        enter = self._next.op is Op.ENTER and self._next.phase is Phase.FORWARD
        return self._participates or (enter and first in (None, self._next.unit))

    def improvise(self) -> None:
        self.improvised, self.ended = True, False

    def match(self, cue: Cue, needed: bool = False) -> Step | None:
        """The step of ``cue``, or ``None`` from the first surprise on.

        Args:
            needed: the unit that is entered has to be gathered first.

        Raises:
            ScheduleError: other ranks do not gather it any more.
        """
        if cue.op is not Op.END:
            self._seen.append(cue)
        self._counts[cue] += 1
        passed: tuple[Event, ...] = ()
        if self._participates and not self.improvised:
            at = self._place_of(cue, needed)
            if at is None:
                return Step(cue, (), self._late_free(cue))
            passed = tuple(e for s in self._script[self._at : at] for e in (*s.before, *s.after))
            self._at = at
        if self._next != cue:
            self.improvised = True
            return None
        self._at += 1
        step = self._script[self._at - 1]
        return step._replace(before=passed + step.before) if passed else step

    def _place_of(self, cue: Cue, needed: bool) -> int | None:
        """How far a rank that participates goes at ``cue``; ``None``: it stays where it is."""
        places = self._places[cue]
        if (later := bisect_left(places, self._at)) == len(places):
            if needed:
                raise _not_listed(cue.unit, "called after its last place in the order of units")
            return None
        at = places[later]
        if needed or cue.op is Op.END:
            return at
        may_return = cue.op is Op.EXIT and cue.phase is Phase.FORWARD
        kept_back = may_return or any(map(self._keeps_back, range(self._at, at + 1)))
        return None if kept_back else at

    def _keeps_back(self, at: int) -> bool:
        """Is this the end of a backward pass that is the last listed, but not this rank's last?"""
        op, unit, phase = cue = self._script[at].cue
        if op is not Op.EXIT or phase is Phase.FORWARD:
            return False
        to_come = self._counts[Cue(Op.ENTER, unit, Phase.FORWARD)] - self._counts[cue]
        return to_come > len(self._places[cue]) - bisect_right(self._places[cue], at)

    def _late_free(self, cue: Cue) -> tuple[Event, ...]:
        """What frees a unit that was still in use when the cursor came to its ``EXIT``."""
        places = self._places[cue] if cue.op is Op.EXIT else []
        after = self._script[places[-1]].after if places and places[-1] < self._at else ()
        return tuple(event for event in after if (event.op, event.unit) == (Op.FREE, cue.unit))

    def check_recomputed(self, unit: str) -> None:
        """Raises ``ScheduleError`` if no other rank gathers a unit that is recomputed on this."""
        if self._participates and not self.improvised:
            raise _not_listed(unit, "recomputed before its place in the order of units")

    def awaits_backward(self, unit: str, op: Op) -> bool:
        """Is the backward pass of a call of ``unit`` still to be entered (or left, by ``op``)?"""
        called = self._counts[Cue(Op.ENTER, unit, Phase.FORWARD)]
        return called > self._counts[Cue(op, unit, Phase.BACKWARD)]

    def changed_order(self) -> Order | None:
        """What came instead of what was expected; ``None`` if it is no order of a whole step.

        A second backward pass through one graph has no forward pass. What other ranks see instead
        of it is unknown where they may differ.
        """
        forward = tuple(cue for cue in self._seen if cue.phase is Phase.FORWARD)
        backward = tuple(cue for cue in self._seen if cue.phase is Phase.BACKWARD)
        learns = self.improvised and not self._participates
        return Order(forward, backward) if learns and forward else None


def _not_listed(unit: str, how: str) -> ScheduleError:
    return ScheduleError(
        f"unit {unit or '(root)'!r} is {how}, and is not gathered. With divergence='participate' "
        "every rank gathers each unit as often as that order lists it, so other ranks would not "
        "gather it now. Call units in the order of registration or of sharded.rehearse(batch), "
        "several times in a row only, and checkpoint one unit at a time; or choose "
        "'shard_grad_op' or 'hybrid_shard_zero2', which keep units whole until their backward pass."
    )
