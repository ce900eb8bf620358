"""The schedules of one model: one for each kind and mode of a step, from an order that may change.

An order is guessed first; later it is what a real step did. To train other units is another kind
of step: a GAN, which switches its discriminator off and on in each step, has two, and would build
each anew every time if there were room for one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.plan.schedule.decide import Step, steps
from shardwise.plan.schedule.events import MODES, Mode, Order, Policy, UnitBytes
from shardwise.runtime.unit import UnitState

log = logging.getLogger("shardwise")

KINDS = 16
"""Kinds of steps that are kept. Which units are trained may be drawn anew at every step."""


@dataclass
class _Kind:
    """One kind of step."""

    orders: dict[Mode, Order]
    scripts: dict[Mode, tuple[Step, ...]] = field(default_factory=dict)
    ran: set[Mode] = field(default_factory=set)  # the modes in which such a step was taken


class Schedules:
    """One schedule for each mode, built when it is first needed; ``order`` is the first guess."""

    def __init__(self, units: Mapping[str, UnitState], policy: Policy, order: Order) -> None:
        self._units, self._policy = units, policy
        self.steps_done = 0  # backward passes that have ended
        self._warned = set[Mode]()
        first = dict.fromkeys(MODES, order) | {"forward": Order(order.forward)}
        self._kinds: dict[frozenset[str], _Kind] = {}  # by trained units, the last used is last
        self._take(frozenset(n for n, state in units.items() if state.trainable), _Kind(first))

    def turn_to(self, trained: frozenset[str]) -> None:
        """Train these units from now on."""
        known = self._kinds.pop(trained) if trained in self._kinds else _Kind(dict(self.orders))
        self._take(trained, known)
        if len(self._kinds) > KINDS:
            del self._kinds[next(iter(self._kinds))]

    def _take(self, trained: frozenset[str], kind: _Kind) -> None:
        self._kinds[trained] = kind
        self.orders, self._scripts, self.ran = kind.orders, kind.scripts, kind.ran

    def nbytes(self) -> dict[str, UnitBytes]:
        return {name: state.nbytes() for name, state in self._units.items()}

    def script(self, mode: Mode) -> tuple[Step, ...]:
        """The schedule of ``mode``, as it stands now."""
        if mode not in self._scripts:
            self._scripts[mode] = steps(self.orders[mode], self._policy, self.nbytes(), mode)
        return self._scripts[mode]

    def set_order(self, mode: Mode, order: Order) -> None:
        """Give ``mode`` another order from now on."""
        self.orders[mode] = order
        self._scripts.pop(mode, None)

    def learn(self, mode: Mode, order: Order | None, logs: bool) -> None:
        """A step in ``mode`` is over; ``order``: what came instead of what was expected.

        An order that changes after a step has followed it is logged once, if ``logs``.
        """
        self.steps_done += mode != "forward"
        if order is not None and order != self.orders[mode]:
            self.set_order(mode, order)
            if logs and mode in self.ran and mode not in self._warned:
                self._warned.add(mode)
                log.warning(
                    "the order of units changed in step %d (%s): the new one is used from now on. "
                    "A model whose order changes often gains nothing from prefetch; set "
                    "prefetch=sw.Prefetch(forward=0, backward=0). This is logged once.",
                    self.steps_done,
                    mode,
                )
        self.ran.add(mode)
