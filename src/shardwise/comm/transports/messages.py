"""Collectives as point-to-point messages, without staging buffers; a subclass sends them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from shardwise.comm.protocol import OnReceived, Sizes, rows_of
from shardwise.comm.transports.transport import Group, Transfer
from shardwise.comm.watchdog.desync import Collective


class MessagesComm(Group):
    """One rank's communicator in a group whose ranks send messages. See ``Comm``."""

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

    def _exchange(
        self, collective: Collective, full: Tensor, on_received: OnReceived, out: Tensor | None
    ) -> Transfer:
        pieces = list(rows_of(full, self.size).unbind())
        sends = {peer: pieces[peer] for peer in self.peers}
        receives = {} if out is None else {int(self.rank == 0): out}
        others = [peer for peer in self.peers if peer not in receives]
        numel = pieces[0].numel()
        scratch = self.memory.gradient(numel * len(others), full.dtype)
        receives |= zip(others, scratch.view(len(others), numel), strict=True)
        for peer, piece in receives.items():
            pieces[peer] = piece
        return Transfer(self._post(collective, sends, receives), partial(on_received, pieces))

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
