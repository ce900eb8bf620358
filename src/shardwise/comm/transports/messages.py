"""Collectives as point-to-point messages, without staging buffers; a subclass sends them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shardwise.comm.memory import Memory
from shardwise.comm.protocol import OnReceived, Sizes, rows_of
from shardwise.comm.transports.transport import IMMEDIATE, Group, Shutdown, Transfer
from shardwise.comm.watchdog.desync import Collective


class MessagesComm(Group):
    """One rank's communicator in a group whose ranks send messages. See ``Comm``."""

    def __init__(
        self, rank: int, size: int, device: torch.device, shutdown: Shutdown = IMMEDIATE
    ) -> None:
        super().__init__(rank, size, device, shutdown)
        self._scratch = _Scratch(self.memory)

    @abstractmethod
    def _post(
        self, collective: Collective, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        """Start sends and receives (peer → contiguous memory); returns a function that waits.

        Two messages match only if their collectives are equal.

        Raises, now or on completion:
            RanksDisagree: a peer issued another collective, or has ended.
        """

    def _all_gather(self, collective: Collective, full: Tensor) -> Transfer:
        pieces = rows_of(full, self.size).unbind()
        sends = dict.fromkeys(self.peers, pieces[self.rank])
        receives = {peer: pieces[peer] for peer in self.peers}
        return Transfer(self._post(collective, sends, receives))

    def _exchange(self, collective: Collective, full: Tensor, on_received: OnReceived) -> Transfer:
        pieces = list(rows_of(full, self.size).unbind())
        nbytes = full.nbytes - pieces[self.rank].nbytes
        memory = self._scratch.take(nbytes)
        buffers = rows_of(memory[:nbytes].view(full.dtype), self.size - 1).unbind()
        sends = {peer: pieces[peer] for peer in self.peers}
        receives = dict(zip(self.peers, buffers, strict=True))
        for peer, buffer in receives.items():
            pieces[peer] = buffer

        def finish() -> None:
            on_received(pieces)
            self._scratch.keep(memory)

        return Transfer(self._post(collective, sends, receives), finish)

    def _all_to_all(
        self, collective: Collective, sent: Tensor, received: Tensor, sizes: Sizes
    ) -> Transfer:
        outgoing = sent.split(list(sizes[self.rank]))
        incoming = received.split([row[self.rank] for row in sizes])
        incoming[self.rank].copy_(outgoing[self.rank])
        sends = {peer: outgoing[peer] for peer in self.peers if outgoing[peer].numel()}
        receives = {peer: incoming[peer] for peer in self.peers if incoming[peer].numel()}
        return Transfer(self._post(collective, sends, receives))

    def _broadcast(self, collective: Collective, data: Tensor, root: int) -> Transfer:
        is_root = self.rank == root
        sends = dict.fromkeys(self.peers, data) if is_root else {}
        return Transfer(self._post(collective, sends, {} if is_root else {root: data}))


class _Scratch:
    """Receive buffers of reductions, kept for the next one.

    From 32 MB up, faulting in fresh pages costs over ten times as much as writing to them.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._free: list[Tensor] = []

    def take(self, nbytes: int) -> Tensor:
        """At least ``nbytes`` of uint8, uninitialised: the smallest free buffer, or a new one."""
        self._free.sort(key=lambda memory: memory.nbytes)
        for i, memory in enumerate(self._free):
            if memory.nbytes >= nbytes:
                return self._free.pop(i)
        if self._free:
            self._free.pop()  # the new one, which is larger, replaces it
        return self._memory.gradient(nbytes, torch.uint8)

    def keep(self, memory: Tensor) -> None:
        self._free.append(memory)
