"""A place in a schedule: what comes next, and what really happened on the way.

The runtime asks the cursor about each cue. From the first surprise on the cursor has no answer,
and the runtime improvises. The cursor records what happens, which is the next step's order.
"""

from __future__ import annotations

from collections import defaultdict

from shardwise.plan.schedule.decide import Step
from shardwise.plan.schedule.events import Cue, Mode, Op, Order, Phase


class Cursor:
    """A place in one mode's schedule, and what really happened on the way."""

    def __init__(self, mode: Mode, script: tuple[Step, ...]) -> None:
        self.mode, self._rest = mode, iter(script)
        self._next = next(self._rest, None)  # None: from the first surprise on, and at the end
        self.improvised, self.ended = not script, not script
        self._seen: list[Cue] = []
        self._counts: dict[tuple[Op, str, Phase], int] = defaultdict(int)  # of each cue

    def lists_forward(self, mode: Mode, first: str | None) -> bool:
        """Does a step in ``mode`` go on with another forward pass here, of unit ``first``?

        A root may have no unit to tell by: then any unit may be next.
        """
        if mode != self.mode or self._next is None:
            return False
        op, unit, phase = self._next.cue
        return op is Op.ENTER and phase is Phase.FORWARD and first in (None, unit)

    def improvise(self) -> None:
        self.improvised, self.ended, self._next = True, False, None

    def match(self, cue: Cue) -> Step | None:
        """The step of ``cue``, or ``None`` from the first surprise on."""
        if cue.op is not Op.END:
            self._seen.append(cue)
        self._counts[cue] += 1
        step = self._next
        if step is None or step.cue != cue:
            self.improvised, self._next = True, None
            return None
        self._next = next(self._rest, None)
        return step

    def awaits_backward(self, unit: str, op: Op) -> bool:
        """Is the backward pass of a call of ``unit`` still to be entered (or left, by ``op``)?"""
        called = self._counts[Op.ENTER, unit, Phase.FORWARD]
        return called > self._counts[op, unit, Phase.BACKWARD]

    def changed_order(self) -> Order | None:
        """Return what came instead of what was expected; ``None`` if it is no whole step.

        A second backward pass through one graph has no forward pass.
        """
        if not self.improvised:
            return None
        forward = tuple(cue for cue in self._seen if cue.phase is Phase.FORWARD)
        backward = tuple(cue for cue in self._seen if cue.phase is Phase.BACKWARD)
        return Order(forward, backward) if forward else None
