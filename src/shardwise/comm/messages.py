"""Collectives as messages between peers, whatever carries the messages.

Each piece goes straight from where it lies to where it belongs. Over gloo its own collectives
would stage a gather through a second buffer and send a reduce-scatter as a whole all-reduce.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shardwise.comm.desync import Collective
from shardwise.comm.group import Ending, Group, Transfer
from shardwise.comm.memory import Memory
from shardwise.comm.protocol import Use, rows_of

__all__ = ["MessagesComm"]


class MessagesComm(Group):
    """One rank's end of a group whose ranks send each other messages. See ``Comm``."""

    def __init__(
        self, rank: int, size: int, device: torch.device, ending: Ending | None = None
    ) -> None:
        super().__init__(rank, size, device, ending)
        self._scratch = _Scratch(self.memory)

    @abstractmethod
    def _post(
        self, collective: Collective, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        """Start to send and receive (peer → contiguous memory); return what completes it.

        Two ends meet only if both name the same collective.

        Raises, now or on completion:
            RanksDisagree: a peer is at another collective, or is gone.
        """

    def _all_gather(self, collective: Collective, full: Tensor) -> Transfer:
        pieces = rows_of(full, self.size).unbind()
        sends = dict.fromkeys(self.peers, pieces[self.rank])
        receives = {peer: pieces[peer] for peer in self.peers}
        return Transfer(self._post(collective, sends, receives))

    def _exchange(self, collective: Collective, full: Tensor, use: Use) -> Transfer:
        pieces = list(rows_of(full, self.size).unbind())
        others = full.nbytes - pieces[0].nbytes
        memory = self._scratch.take(others)
        places = rows_of(memory[:others].view(full.dtype), self.size - 1).unbind()
        sends = {peer: pieces[peer] for peer in self.peers}
        receives = dict(zip(self.peers, places, strict=True))
        for peer, place in receives.items():
            pieces[peer] = place

        def finish() -> None:
            use(pieces)
            self._scratch.keep(memory)

        return Transfer(self._post(collective, sends, receives), finish)

    def _broadcast(self, collective: Collective, data: Tensor, root: int) -> Transfer:
        here = self.rank == root
        sends = dict.fromkeys(self.peers, data) if here else {}
        return Transfer(self._post(collective, sends, {} if here else {root: data}))


class _Scratch:
    """Memory for what peers send to be summed, kept for the next reduction.

    Fresh pages cost more than writing to them: over ten times as much from 32 MB up.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._free: list[Tensor] = []

    def take(self, nbytes: int) -> Tensor:
        """At least ``nbytes`` of uint8, uninitialised: the smallest free that fits, or new."""
        self._free.sort(key=lambda memory: memory.nbytes)
        for i, memory in enumerate(self._free):
            if memory.nbytes >= nbytes:
                return self._free.pop(i)
        if self._free:
            self._free.pop()  # what replaces it is larger
        return self._memory.gradient(nbytes, torch.uint8)

    def keep(self, memory: Tensor) -> None:
        self._free.append(memory)
