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
        self.mode, self._script, self._at = mode, script, 0
        self.improvised, self.ended = not script, not script
        self._seen: list[Cue] = []
        self._counts: dict[Cue, int] = defaultdict(int)

    @property
    def _next(self) -> Cue | None:
        known = not self.improvised and self._at < len(self._script)
        return self._script[self._at].cue if known else None

    def lists_forward(self, mode: Mode, first: str | None) -> bool:
        """Does a step in ``mode`` go on with another forward pass here, of unit ``first``?

        A root may have no unit to tell by: then any unit may be next.
        """
        if mode != self.mode or self._next is None:
            return False
        enter = self._next.op is Op.ENTER and self._next.phase is Phase.FORWARD
        return enter and first in (None, self._next.unit)

    def improvise(self) -> None:
        self.improvised, self.ended = True, False

    def match(self, cue: Cue) -> Step | None:
        """The step of ``cue``, or ``None`` from the first surprise on."""
        if cue.op is not Op.END:
            self._seen.append(cue)
        self._counts[cue] += 1
        if self._next != cue:
            self.improvised = True
            return None
        self._at += 1
        return self._script[self._at - 1]

    def awaits_backward(self, unit: str, op: Op) -> bool:
        """Is the backward pass of a call of ``unit`` still to be entered (or left, by ``op``)?"""
        called = self._counts[Cue(Op.ENTER, unit, Phase.FORWARD)]
        return called > self._counts[Cue(op, unit, Phase.BACKWARD)]

    def changed_order(self) -> Order | None:
        """Return what came instead of what was expected; ``None`` if it is no whole step.

        A second backward pass through one graph has no forward pass.
        """
        forward = tuple(cue for cue in self._seen if cue.phase is Phase.FORWARD)
        backward = tuple(cue for cue in self._seen if cue.phase is Phase.BACKWARD)
        return Order(forward, backward) if self.improvised and forward else None
