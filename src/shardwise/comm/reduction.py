"""Sums over ranks: what travels, in which order it is added up, and what it is divided by.

    full ──narrow──▶ wire ──exchange──▶ one piece per rank ──sum in rank order──▶ divide ──▶ out
    [W * S]          [W * S]            W × [S]                                              [S]

Transports move bytes and compute nothing, so sums are the same bits over threads, messages and
shared memory. gloo's own reduce-scatter is a hidden all-reduce in an order of its own. NCCL, XCCL
and HCCL keep their own sum where one dtype travels and is summed in. A wire in another format
(blocks of int8, say) is encoded where it is narrowed here, and decoded where it is summed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.comm.protocol import Comm, Done, Label, Pending

__all__ = ["Reducing", "Reduction", "sum_in_rank_order"]

PART = 1 << 16  # elements that are summed at a time: some of each rank's fit in the second cache


class Reducing(NamedTuple):
    """A reduction in flight.

    Attributes:
        sent: ``[W * S]``, what travels; it must outlive ``pending``.
        out: ``[S]``, this rank's piece of the mean, once ``pending`` was waited for.
    """

    sent: Tensor
    out: Tensor
    pending: Pending


@dataclass(frozen=True)
class Reduction:
    """How the gradients of one bucket become their mean over ranks.

    Attributes:
        wire: the dtype that travels.
        sum: the dtype that sums are formed in, equal or wider.
        how: the name of this way to form the mean. With ``"avg"`` the backend divides by the
            number of ranks where it can, and else the sum is divided by that.
        before, after: divisors of the addends and of the sum. Dividing is exact where
            multiplying by 1/W is not (W = 3).
    """

    wire: torch.dtype
    sum: torch.dtype
    how: str = "postdivide"
    before: float = 1.0
    after: float = 1.0

    def start(self, full: Tensor, comm: Comm, label: Label) -> Reducing:
        """Issue the reduce-scatter of ``full``, ``[W * S]``, which is overwritten. A collective."""
        sent = full
        if full.dtype is not self.wire:
            sent = comm.memory.gradient(full.numel(), self.wire).copy_(full)
        if self.before != 1:
            sent.div_(self.before)
        if comm.size == 1:
            out = sent.to(self.sum)  # the same memory where it can be
            _divide(out, self.after)
            return Reducing(sent, out, Done())
        out = comm.memory.gradient(sent.numel() // comm.size, self.sum)
        return Reducing(sent, out, self._issue(out, sent, comm, label))

    def _issue(self, out: Tensor, sent: Tensor, comm: Comm, label: Label) -> Pending:
        average = self.how == "avg"
        divisor = float(comm.size) if average else self.after
        if not comm.sums or sent.dtype is not out.dtype:
            use = partial(sum_in_rank_order, out, divisor=divisor)
            return comm.exchange(sent, use, label)
        average = average and comm.averages
        pending = comm.reduce_scatter(out, sent, average, label)
        return pending if average or divisor == 1 else _Divided(pending, out, divisor)


class _Divided:
    """A sum in flight that is divided once it is there. Final; see ``Pending``."""

    def __init__(self, pending: Pending, out: Tensor, divisor: float) -> None:
        self._pending, self._out, self._divisor = pending, out, divisor

    def wait(self) -> None:
        self._pending.wait()
        _divide(self._out, self._divisor)
        self._divisor = 1.0  # waiting again is free


def sum_in_rank_order(out: Tensor, pieces: Sequence[Tensor] | Tensor, divisor: float = 1.0) -> None:
    """``out``, ``[n]`` = (pieces[0] + pieces[1] + …) / divisor, each sum rounded to ``out.dtype``.

    The pieces may be narrower than ``out``: they are widened before they are added. On CPU it is
    done part by part, so that what is added to and divided is still in the processor's cache.
    One tensor ``[W, n]`` is summed by one kernel, in an order of its own: as many as ranks, each
    asked for by the host, would cost more.
    """
    size = PART if out.device.type == "cpu" else max(1, out.numel())
    with torch.no_grad():
        if isinstance(pieces, Tensor):
            size = max(1, size // pieces.shape[0])  # the sum makes a wide copy of what it adds
            for part, rows in zip(out.split(size), pieces.split(size, dim=1), strict=True):
                torch.sum(rows, dim=0, dtype=out.dtype, out=part)
            _divide(out, divisor)
            return
        parts = zip(out.split(size), *(piece.split(size) for piece in pieces), strict=True)
        for part, *addends in parts:
            _sum(part, addends)
            _divide(part, divisor)


def _sum(out: Tensor, addends: Sequence[Tensor]) -> None:
    if len(addends) > 1 and addends[0].dtype == out.dtype:
        torch.add(addends[0], addends[1], out=out)
        rest = addends[2:]
    else:
        out.copy_(addends[0])
        rest = addends[1:]
    for addend in rest:
        out.add_(addend)


def _divide(out: Tensor, divisor: float) -> None:
    """Divide in place; a power of two is multiplied by, which gives the same bits sooner."""
    if divisor != 1:
        out.mul_(1 / divisor) if math.frexp(divisor)[0] == 0.5 else out.div_(divisor)
