"""The messages between ranks of which some may run out of data.

    rank 0   TRAIN  EVENT …  BACKWARD  EVENT …  END_BACKWARD  STEP  TRAIN  …  LEFT
    rank 1   LEFT   the same events and calls, as they are received            LEFT

A message is one row of numbers from each rank, gathered. Where a call begins, each rank sends one,
so all know who has left and how many samples each has; what happens inside it is sent only while
somebody has left. torch's Join context has each library imitate its own collectives on such a
rank; here events are values, so they can be sent.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.comm.protocol import Comm, Label
from shardwise.errors import RanksDisagree, ScheduleError
from shardwise.memory.gradients import Share
from shardwise.schedule.events import Event, Op, Phase

__all__ = ["Join", "Kind", "Message", "share_of"]


class Kind(IntEnum):
    """What a rank does."""

    LEFT = 0  # it has run out of data
    # The begin of a call, for which each rank sends a message:
    FORWARD = 1  # a forward pass without gradients
    TRAIN = 2  # one with gradients
    CLIP = 3
    STEP = 4  # of an optimizer
    VOTE = 5  # ``sharded.any`` and ``sharded.all``
    UNSCALE = 6  # of a GradScaler
    REQUIRES_GRAD = 7  # of some parameters has changed
    # What happens in a pass, which is sent to those that have left:
    EVENT = 8
    END_FORWARD = 9
    BACKWARD = 10
    END_BACKWARD = 11


class Message(NamedTuple):
    """What the ranks that have data do next."""

    kind: Kind
    values: tuple[int, ...]  # three; their meaning depends on the kind
    numbers: list[float]


OPS, PHASES = list(Op), list(Phase)


class Join:
    """One ``join()`` block of one rank.

    Args:
        units: all units, by name.
        count: the samples in what the model is called with; ``None``: each batch counts alike.

    Attributes:
        optimizers: those that step in the block.
        left: the ranks that have run out of data, as of the last message.
        has_left: is this rank one of them?
        missed_steps: optimizer steps of this rank since then, in which it had no data.
    """

    def __init__(
        self, comm: Comm, units: Sequence[str], count: Callable[..., float] | None = None
    ) -> None:
        self._comm, self._units, self._count = comm, list(units), count
        self.optimizers: Sequence[Optimizer] = ()
        self.left: list[int] = []
        self.has_left, self.missed_steps = False, 0
        self.share = Share()
        self._samples = self._passes = 0.0  # since gradients were reduced last
        self._last = comm.rank  # the rank whose message was followed last

    # ---- messages --------------------------------------------------------------------------

    def send(
        self, kind: Kind, *values: int, numbers: Callable[[], Sequence[float]] = tuple
    ) -> list[list[float]]:
        """Send what this rank does to the others; returns their rows, where each sends one.

        Args:
            values: three at most. The first two have to be the same on every rank that has data.
            numbers: what those that have left need besides.

        Raises:
            RanksDisagree: the ranks that have data do not do the same.
        """
        is_call = kind < Kind.EVENT
        if self.has_left or not (is_call or self.left):
            return []
        extra = list(numbers())  # a rank may have left since the last message
        digest = zlib.crc32(repr(extra).encode()) if kind in (Kind.STEP, Kind.UNSCALE) else 0
        rows = self._gather([kind, *values, *[0] * (3 - len(values)), digest, len(extra)])
        calls = rows.tolist() if is_call else []
        if is_call:
            self._compare(calls)
        if kind is Kind.TRAIN:
            self._weigh(calls)
        if self.left and extra:
            self._gather(extra)
        return calls

    def receive(self) -> Message | None:
        """What the first rank that has data does next; ``None``: no rank has any."""
        rows = self._gather([Kind.LEFT] * 6).tolist()
        self.left = [rank for rank, row in enumerate(rows) if row[0] == Kind.LEFT]
        at = next((rank for rank, row in enumerate(rows) if row[0] != Kind.LEFT), None)
        if at is None:
            return None
        self._last = at
        kind, *values, _, size = map(int, rows[at][:6])
        if kind == Kind.TRAIN:
            self._weigh(rows)
        numbers = self._gather([0.0] * size)[at, :size].tolist() if size else []
        return Message(Kind(kind), tuple(values), numbers)

    def of_last(self, numbers: Sequence[float]) -> list[float]:
        """When all have left: those numbers of the rank that had data longest."""
        return self._gather(numbers)[self._last, : len(numbers)].tolist()

    def _gather(self, row: Sequence[float]) -> Tensor:
        """``[ranks, len(row) + 2]``: every rank's, with its samples and passes."""
        # float64 keeps counts of samples exact up to 2^53.
        mine = torch.tensor([*row, self._samples, self._passes], dtype=torch.float64)
        return self._comm.gather_rows(mine.to(self._comm.device), Label("join", "what is next"))

    def _compare(self, rows: Sequence[Sequence[float]]) -> None:
        self.left = [rank for rank, row in enumerate(rows) if row[0] == Kind.LEFT]
        calls = {rank: row for rank, row in enumerate(rows) if rank not in self.left}
        first, *others = calls
        for rank in others:
            kinds = [Kind(int(calls[r][0])).name.lower() for r in (first, rank)]
            if kinds == ["train", "train"] and calls[rank][1] != calls[first][1]:
                raise RanksDisagree(
                    "inside join() other parameters have gradients before a forward pass on rank "
                    f"{first} than on rank {rank}. Call optimizer.zero_grad() after the same steps "
                    "on all ranks that have data."
                )
            if calls[rank][:3] != calls[first][:3]:
                raise RanksDisagree(
                    f"inside join() rank {first} is at a call of kind {kinds[0]!r}, and rank "
                    f"{rank} at {kinds[1]!r}. All with data have to do the same, in one order."
                )
            if calls[rank][4] != calls[first][4] and calls[rank][0] == Kind.UNSCALE:
                raise RanksDisagree(
                    f"a GradScaler has another scale on rank {rank} than on rank {first}: it was "
                    "updated in an earlier join() while one of them had no data. Pass it to each "
                    "block: sharded.join(optimizer, scaler=scaler)."
                )
            if calls[rank][4] != calls[first][4]:
                raise RanksDisagree(
                    f"an optimizer steps with other options (such as the learning rate) on rank "
                    f"{rank} than on rank {first}. A scheduler that steps inside join() steps less "
                    "often on ranks that run out of data: after the block, step it there for "
                    "another `joined.missed_steps` times."
                )

    # ---- messages of each kind ---------------------------------------------------------------

    def begin_forward(
        self, trains: bool, gradients: int, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """A forward pass begins: with samples if it ``trains``, and a digest of ``gradients``."""
        if trains and not self.has_left:
            self._passes += 1
            self._samples += 1 if self._count is None else float(self._count(*args, **kwargs))
        self.send(Kind.TRAIN if trains else Kind.FORWARD, gradients if trains else 0)

    def send_event(self, event: Event) -> None:
        """An event is carried out next."""
        if self.left:
            unit, phase = self._units.index(event.unit), PHASES.index(event.phase)
            self.send(Kind.EVENT, OPS.index(event.op), unit, phase)

    def event(self, message: Message) -> Event:
        """The event of a message."""
        op, unit, phase = message.values
        return Event(OPS[op], self._units[unit], PHASES[phase], "sent by a rank that has data")

    def end_backward(self, reduces: bool) -> None:
        """A backward pass ends; where it ``reduces``, other samples are counted from now on."""
        self.send(Kind.END_BACKWARD)
        if reduces:
            self._samples = self._passes = 0.0

    def refuse(self, operation: str) -> None:
        """Raises ``ScheduleError`` for what ranks that have left could not do as well."""
        if self.left and not self.has_left:
            raise ScheduleError(
                f"{operation} while ranks {self.left} have run out of data. Until the end of "
                "join() they take part in forward and backward passes, sharded.clip_grad_norm_(), "
                "steps of the optimizers that join() was given, also by a GradScaler, sharded.any()"
                " and sharded.all(), and in nothing else. Do it after the block."
            )

    # ---- the mean ----------------------------------------------------------------------------

    def _weigh(self, rows: Sequence[Sequence[float]]) -> None:
        self.share = share_of(self._comm.rank, [(row[-2], row[-1]) for row in rows])


def share_of(rank: int, counts: Sequence[tuple[float, float]]) -> Share:
    """How much this rank's gradients count, so that their mean is that over all samples.

    Losses are means over a batch, divided by the number of micro-batches (the largest of any rank),
    and a rank's micro-batches are of one size, or nearly so.

    Args:
        counts: of each rank, its samples and its micro-batches in this step.

    Raises:
        ScheduleError: there is no sample.
    """
    sizes = [samples / passes if passes else 0.0 for samples, passes in counts]
    total, largest = sum(samples for samples, _ in counts), max(sizes)
    if not (total > 0 and min(sizes) >= 0):
        raise ScheduleError(
            f"the ranks' batches have {[samples for samples, _ in counts]} samples, of which no "
            "mean can be formed. Let the function that join(samples=…) was given return the "
            "number of samples that the loss is a mean over."
        )
    most = max(passes for _, passes in counts)
    return Share(sizes[rank] / largest, total / (most * largest))
