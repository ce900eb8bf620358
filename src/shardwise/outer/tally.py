"""The parts of means that have come, and those that are awaited. Pure.

A mean is formed when every worker that was present at the leader's part has sent its own, or is
lost. A worker that comes later gets that mean, and is awaited from the next one on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Key(NamedTuple):
    """One mean: of a unit, and the number of its updates before."""

    unit: str
    update: int

    def __str__(self) -> str:
        """The unit's name, for messages."""
        return self.unit or "(root)"


class Tally:
    """The parts that the leader has.

    Args:
        own: its number among the workers.
        formed: means that are there already, of the leader before this one.
    """

    def __init__(self, own: int, formed: Iterable[Key] = ()) -> None:
        self._own, self.present = own, {own}
        self._parts: dict[Key, dict[int, bytes]] = {}
        self._awaited: dict[Key, set[int]] = {}
        self._formed = dict(sorted(formed))  # unit → the update whose mean was formed last

    def add(self, worker: int, key: Key, part: bytes) -> None:
        """Take a part; one that comes after its mean was formed counts no more."""
        if key.update <= self._formed.get(key.unit, -1):
            return
        if worker == self._own:
            self._awaited.setdefault(key, set(self.present))
        self._parts.setdefault(key, {})[worker] = part

    def drop(self, worker: int) -> None:
        """A worker is lost: it is awaited no more, and what it sent counts."""
        self.present.discard(worker)
        for awaited in self._awaited.values():
            awaited.discard(worker)

    def missing(self, key: Key) -> list[int]:
        """The workers whose part is awaited."""
        return sorted(self._awaited.get(key, {self._own}) - self._parts.get(key, {}).keys())

    def take(self) -> list[tuple[Key, list[bytes]]]:
        """The means that are due, with their parts in the order of workers. They are forgotten."""
        due = [key for key in self._parts if not self.missing(key)]
        for key in due:
            self._formed[key.unit] = key.update
            del self._awaited[key]
        return [(key, [part for _, part in sorted(self._parts.pop(key).items())]) for key in due]
