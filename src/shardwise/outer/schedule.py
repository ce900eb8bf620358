"""The local steps after which units are sent, and their means are received. Pure.

All units at once would leave the link idle for H steps and then keep all workers waiting. Here each
unit has a step of its own in the round, so that bytes are spread, and a mean is received ``delay``
steps after it was sent, while training goes on:

    local step    1     2     3     4     5     6     7     8       every = 4, delay = 1
    sent                a           b           a           b
    received                  a           b           a

Source: Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512, §2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from shardwise.errors import ConfigError


@dataclass(frozen=True)
class OuterSchedule:
    """The order of exchanges with other workers.

    Attributes:
        every: local steps between two exchanges of a unit (H).
        delay: local steps from sending a unit to receiving its mean; 0 waits for it.
        offsets: unit → the step of its round after which it is sent, 1 to ``every``.
    """

    every: int
    delay: int
    offsets: Mapping[str, int]

    @classmethod
    def spread(cls, nbytes: Mapping[str, int], every: int, delay: int | None) -> OuterSchedule:
        """Spread units over a round by their bytes, in their order; the last is sent at its end.

        Args:
            delay: ``None``: an eighth of ``every``, so 0 below 8.

        Raises:
            ConfigError: ``every`` or ``delay`` is out of range.
        """
        if every < 1:
            raise ConfigError(f"every is {every}; workers exchange after at least 1 local step.")
        delay = every // 8 if delay is None else delay
        if not 0 <= delay < every:
            raise ConfigError(
                f"delay is {delay} and every is {every}: a unit would be sent again before its "
                f"mean is there. Choose a delay from 0 to {every - 1}."
            )
        total = sum(nbytes.values()) or 1
        ends = accumulate(nbytes.values())
        return cls(every, delay, {u: -(-every * e // total) for u, e in zip(nbytes, ends)})  # noqa: B905

    def is_due(self, step: int) -> bool:
        """Is anything sent or received after local step ``step``?"""
        return bool(self.sent(step) or self.received(step))

    def sent(self, step: int) -> list[str]:
        """The units that are sent after local step ``step``, counted from 1."""
        return [unit for unit, offset in self.offsets.items() if not (step - offset) % self.every]

    def rounds(self, step: int) -> dict[str, int]:
        """Unit → how often it was sent in the first ``step`` local steps."""
        return {u: (step - offset) // self.every + 1 for u, offset in self.offsets.items()}

    def received(self, step: int) -> list[str]:
        """The units whose mean is received after local step ``step``."""
        return self.sent(step - self.delay) if step > self.delay else []
