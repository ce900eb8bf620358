"""The schedules of one model: one for each mode of a step, from an order that may change.

An order is guessed first; later it is what a real step did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwise.cursor import Step, steps
from shardwise.schedule import Event, Order, Policy, Weight, events
from shardwise.unit_state import UnitState

__all__ = ["Mode", "Schedules"]

Mode = str
"""``"train"``; ``"accumulate"`` and ``"last"`` micro-batch; ``"forward"`` without gradients."""


class Schedules:
    """One schedule for each mode, built when it is first needed.

    Args:
        units: the state of each unit, by name, in order.
        policy: placement and prefetch; modes are derived from it.
        order: the first guess.

    Attributes:
        orders: by mode.
    """

    def __init__(self, units: Mapping[str, UnitState], policy: Policy, order: Order) -> None:
        self._units, self._policy = units, policy
        self.orders: dict[Mode, Order] = {
            "train": order,
            "accumulate": order,
            "last": order,
            "forward": Order(order.forward),
        }
        self._scripts: dict[Mode, tuple[Step, ...]] = {}

    def weights(self) -> dict[str, Weight]:
        """Bytes of each unit: gathered parameters, and gradients."""
        return {name: state.weight() for name, state in self._units.items()}

    def events(self, mode: Mode) -> tuple[Event, ...]:
        """The schedule of ``mode``, as it stands now."""
        return events(self.orders[mode], self._policy_of(mode), self.weights())

    def script(self, mode: Mode) -> tuple[Step, ...]:
        """The same, cut at its cues."""
        if mode not in self._scripts:
            self._scripts[mode] = steps(self.events(mode))
        return self._scripts[mode]

    def set_order(self, mode: Mode, order: Order) -> None:
        """Let ``mode`` have another order from now on."""
        self.orders[mode] = order
        self._scripts.pop(mode, None)

    def _policy_of(self, mode: Mode) -> Policy:
        stays = not self._policy.placement.frees
        held = frozenset(self._units) if mode == "last" and stays else frozenset()
        return replace(self._policy, reduces=mode != "accumulate", held=held)
