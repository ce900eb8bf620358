"""Collectives as messages between peers, whatever carries the messages.

Each piece goes straight from where it lies to where it belongs, and each rank sums what it
receives in rank order. Over gloo its own collectives would stage a gather through a second
buffer and send a reduce-scatter as a whole all-reduce; and sums formed in one place, here, are
bit-identical over every wire.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from shardwise.comm.desync import Collective, facts_differ
from shardwise.comm.malloc import fresh
from shardwise.comm.protocol import Counters, Label, Pending
from shardwise.errors import ConfigError, RanksDisagree

__all__ = [
    "InFlight",
    "MessagesComm",
    "Wire",
    "agree",
    "check_splits",
    "pieces_of",
    "sum_in_rank_order",
]


PART = 1 << 16  # elements that are summed at a time: some of each rank's fit in the second cache


class Wire(Protocol):
    """Carries messages. Two ends meet only if both name the same collective."""

    def post(
        self, collective: Collective, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        """Start to send and receive (peer → contiguous memory); return what completes it.

        Raises, now or on completion:
            RanksDisagree: a peer is at another collective, or is gone.
        """

    def share(self, collective: Collective, text: str) -> list[str]:
        """Every rank's ``text``, by rank, outside the data path. Raises as ``post`` does."""

    def fail(self, reason: str) -> RanksDisagree:
        """Make the group unusable for everybody, and return the error to raise."""

    def close(self, how: str) -> None:
        """Leave the group, telling the others how. Safe to call twice."""


class MessagesComm:
    """One rank's end of a group whose messages a wire carries. Final; see ``Comm``."""

    shares = False

    def __init__(self, rank: int, size: int, device: torch.device, wire: Wire) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.counters = Counters()
        self._wire = wire
        self._issued = 0
        # Each rank begins with its successor, so that no rank is everybody's first.
        self._peers = [(rank + step) % size for step in range(1, size)]
        self._scratch = _Scratch(device)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return fresh(numel, dtype, self.device)

    def allocate_bucket(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.allocate(numel, dtype)

    def fence(self, label: Label) -> None:
        """No memory is shared."""

    def all_gather(self, full: Tensor, label: Label) -> Pending:
        pieces = pieces_of(full, self.size, label)
        mine = pieces[self.rank]
        sends = dict.fromkeys(self._peers, mine)
        receives = {peer: pieces[peer] for peer in self._peers}
        return self._post("all_gather", label, full.nbytes, sends, receives)

    def reduce_scatter(
        self, out: Tensor, full: Tensor, label: Label, divisor: float = 1.0, mean: bool = False
    ) -> Pending:
        pieces = list(pieces_of(full, self.size, label))
        need = full.nbytes - pieces[0].nbytes
        memory = self._scratch.take(need)
        theirs = memory[:need].view(full.dtype).view(self.size - 1, out.numel()).unbind()
        sends = {peer: pieces[peer] for peer in self._peers}
        receives = dict(zip(self._peers, theirs, strict=True))
        for peer, received in receives.items():
            pieces[peer] = received

        def finish() -> None:
            sum_in_rank_order(out, pieces, float(self.size) if mean else divisor)
            self._scratch.give_back(memory)

        return self._post("reduce_scatter", label, full.nbytes, sends, receives, finish)

    def broadcast(self, tensor: Tensor, root: int, label: Label) -> Pending:
        data = tensor.detach()
        here = self.rank == root
        sends = dict.fromkeys(self._peers, data) if here else {}
        receives = {} if here else {root: data}
        return self._post(f"broadcast from rank {root}", label, data.nbytes, sends, receives)

    def agree(self, facts: Mapping[str, str]) -> None:
        def share(text: str) -> list[str]:
            return self._wire.share(self._next("agree", Label("agree"), 0), text)

        if difference := agree(facts, share):
            raise self._wire.fail(difference)

    def close(self) -> None:
        self._wire.close("it closed its end of the group")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._wire.close(f"it raised {error!r}" if error else "it closed its end of the group")

    def _next(self, kind: str, label: Label, nbytes: int) -> Collective:
        self._issued += 1
        return Collective(self._issued - 1, kind, label.op, label.unit, nbytes)

    def _post(
        self,
        kind: str,
        label: Label,
        nbytes: int,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
        finish: Callable[[], None] | None = None,
    ) -> Pending:
        complete = self._wire.post(self._next(kind, label, nbytes), sends, receives)
        self.counters.sent(label.op, sum(data.nbytes for data in sends.values()))
        return InFlight(complete, finish, self.counters, label.op)


class InFlight:
    """A collective in flight: what completes it, then what finishes its result. Final."""

    __slots__ = ("__weakref__", "_complete", "_counters", "_finish", "_op")

    def __init__(
        self,
        complete: Callable[[], None],
        finish: Callable[[], None] | None,
        counters: Counters,
        op: str,
    ) -> None:
        self._complete: Callable[[], None] | None = complete
        self._finish = finish
        self._counters = counters
        self._op = op

    def wait(self) -> None:
        """See ``Pending``. Waiting again is free, or the same error again."""
        if self._complete is None:
            return
        start = perf_counter()
        self._complete()
        self._counters.waited(self._op, perf_counter() - start)
        if self._finish is not None:
            self._finish()
        self._complete = self._finish = None  # lets go of the memory


def check_splits(full: Tensor, size: int, label: Label) -> None:
    """Raise ``ConfigError`` unless ``full`` is ``[size * n]`` and contiguous."""
    if full.ndim != 1 or full.numel() % size or not full.is_contiguous():
        raise ConfigError(
            f"{label}: a buffer of shape {tuple(full.shape)} with strides {full.stride()} does not "
            f"split into {size} equal, contiguous pieces. Make it flat, and pad it to a multiple "
            f"of {size}."
        )


def pieces_of(full: Tensor, size: int, label: Label) -> tuple[Tensor, ...]:
    """``full``, ``[size * n]``, as ``size`` views ``[n]`` in rank order."""
    check_splits(full, size, label)
    return full.detach().view(size, full.numel() // size).unbind()


def sum_in_rank_order(out: Tensor, pieces: Sequence[Tensor], divisor: float = 1.0) -> None:
    """``out``, ``[n]`` = (pieces[0] + pieces[1] + …) / divisor, each sum rounded to ``out.dtype``.

    The pieces may be narrower than ``out``: they are widened before they are added. On CPU it is
    done part by part, so that what is added to and divided is still in the processor's cache.
    """
    exact = math.frexp(divisor)[0] == 0.5  # a power of two: multiplying is the same, and faster
    size = PART if out.device.type == "cpu" else max(1, out.numel())
    parts = zip(out.split(size), *(piece.split(size) for piece in pieces), strict=True)
    with torch.no_grad():
        for part, *addends in parts:
            _sum(part, addends)
            if divisor != 1:
                part.mul_(1 / divisor) if exact else part.div_(divisor)


def _sum(out: Tensor, addends: Sequence[Tensor]) -> None:
    if len(addends) > 1 and addends[0].dtype == out.dtype:
        torch.add(addends[0], addends[1], out=out)
        rest = addends[2:]
    else:
        out.copy_(addends[0])
        rest = addends[1:]
    for addend in rest:
        out.add_(addend)


def agree(facts: Mapping[str, str], share: Callable[[str], list[str]]) -> str:
    """How the ranks' facts differ, or ``""``. ``share``: my text → every rank's text.

    Digests first: N ranks that agree then read 64 N bytes each and not N times the facts.
    """
    mine = json.dumps(dict(facts), sort_keys=True)
    if len(set(share(hashlib.sha256(mine.encode()).hexdigest()))) == 1:
        return ""
    return facts_differ([json.loads(text) for text in share(mine)])


class _Scratch:
    """Memory for what peers send to be summed, kept for the next reduction.

    Fresh pages cost more than writing to them: over ten times as much from 32 MB up.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []

    def take(self, nbytes: int) -> Tensor:
        """At least ``nbytes`` of uint8, uninitialised: the smallest free that fits, or new."""
        self._free.sort(key=lambda memory: memory.nbytes)
        for i, memory in enumerate(self._free):
            if memory.nbytes >= nbytes:
                return self._free.pop(i)
        if self._free:
            self._free.pop()  # what replaces it is larger
        return fresh(nbytes, torch.uint8, self._device)

    def give_back(self, memory: Tensor) -> None:
        self._free.append(memory)
