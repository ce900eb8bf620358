"""Reductions over ranks: the dtype that is sent, the order of the sum, and the divisors.

    full ──narrow──▶ wire ──exchange──▶ one piece per rank ──sum in rank order──▶ divide ──▶ out
    [W * S]          [W * S]            W × [S]                                              [S]

Transports move bytes and compute nothing, so sums are the same bits over threads, messages and
shared memory. NCCL, XCCL and HCCL use their own reduce-scatter if the dtypes of wire and sum are
the same. Blocks of 8-bit numbers are encoded where a dtype is narrowed, and decoded where they are
summed (see ``codec``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.comm.codec import Codec, codec_of, wire_nbytes
from shardwise.comm.protocol import Comm, Completed, Label, Pending, rows_of

CHUNK = 1 << 17  # elements summed at a time, so that they stay in the L2 cache


class PendingReduction(NamedTuple):
    """A reduction in flight."""

    sent: Tensor  # [W * S], the send buffer; it must outlive ``pending``
    out: Tensor  # [S], this rank's piece of the mean, valid after ``pending.wait()``
    pending: Pending


@dataclass(frozen=True)
class Reduction:
    """The averaging of one bucket's gradients over ranks."""

    wire: torch.dtype  # that is sent; int8 and fp8 in blocks
    sum: torch.dtype  # of the sum, equal or wider
    # The average mode (see ``Precision``). With "avg" the backend divides by the number of ranks
    # if it can; otherwise the sum is divided.
    how: str = "postdivide"
    # Division is exact where multiplication by 1/W is not (W = 3).
    before: float = 1.0  # divisor of the addends
    after: float = 1.0  # divisor of the sum
    whole: bool = False  # does each rank get all of the sum, and not its piece?
    in_place: bool = False  # does the sum take the place of this rank's piece of what is sent?

    def start(
        self, full: Tensor, comm: Comm, label: Label, out: Tensor | None = None
    ) -> PendingReduction:
        """Issue the reduce-scatter of ``full``, ``[W * S]``, which is overwritten. A collective.

        Args:
            out: the memory for the result, if there is more than one rank.
        """
        sent, codec = full, codec_of(self.wire)
        if codec is None and full.dtype is not self.wire:
            sent = comm.memory.gradient(full.numel(), self.wire).copy_(full)
        if self.before != 1:
            sent.div_(self.before)
        if comm.size == 1:
            out = sent.to(self.sum)  # the same memory if the dtypes are equal
            _divide(out, self.after)
            return PendingReduction(sent, out, Completed())
        if self.in_place:
            out = sent.view(comm.size, -1)[comm.rank]
        elif out is None:
            out = comm.memory.gradient(sent.numel() // (1 if self.whole else comm.size), self.sum)
        if codec is not None:
            nbytes = wire_nbytes(self.wire, sent.numel(), comm.size)
            sent = codec.encode(sent, comm.size, comm.memory.gradient(nbytes, torch.uint8))
        return PendingReduction(sent, out, self._issue(out, sent, codec, comm, label))

    def _issue(
        self, out: Tensor, sent: Tensor, codec: Codec | None, comm: Comm, label: Label
    ) -> Pending:
        divisor = float(comm.size) if self.how == "avg" else self.after
        if self.whole:
            sent = sent.expand(comm.size, -1)
        if codec is not None:
            pieces = comm.size if self.whole else 1
            on_received = partial(_sum_decoded, out, codec, divisor, pieces=pieces)
            return comm.exchange(sent, on_received, label)
        if not comm.has_reduce_scatter or sent.dtype is not out.dtype:
            on_received = partial(sum_in_rank_order, out, divisor=divisor)
            is_free = sent.dtype is out.dtype and not self.in_place
            return comm.exchange(sent, on_received, label, out if is_free else None)
        average = self.how == "avg" and comm.has_average
        pending = comm.reduce_scatter(out, sent, average, label)
        return pending if average or divisor == 1 else _Divided(pending, out, divisor)


class _Divided:
    """A sum in flight that is divided when it is complete. Final; see ``Pending``."""

    def __init__(self, pending: Pending, out: Tensor, divisor: float) -> None:
        self._pending, self._out, self._divisor = pending, out, divisor

    def wait(self) -> None:
        self._pending.wait()
        _divide(self._out, self._divisor)
        self._divisor = 1.0  # waiting again divides no more


def sum_in_rank_order(out: Tensor, pieces: Sequence[Tensor] | Tensor, divisor: float = 1.0) -> None:
    """``out``, ``[n]`` = (pieces[0] + pieces[1] + …) / divisor, each sum rounded to ``out.dtype``.

    The pieces may be narrower than ``out``: they are widened before they are added. One that is not
    may lie in ``out``. On CPU a sum of several passes is formed in chunks that stay in the
    processor's cache. One tensor ``[W, n]`` is summed by one kernel, in the kernel's order, since a
    launch per rank would cost more.
    """
    on_cpu = out.device.type == "cpu"
    with torch.no_grad():
        if isinstance(pieces, Tensor):  # of which torch.sum makes a wide copy on CPU
            size = CHUNK // len(pieces) if on_cpu else out.numel()
            for chunk, rows in zip(out.split(size), pieces.split(size, dim=1), strict=True):
                torch.sum(rows, dim=0, dtype=out.dtype, out=chunk)
            _divide(out, divisor)
            return
        is_one_pass = len(pieces) == 2 and _may_scale(pieces[0], out, divisor)
        size = CHUNK if on_cpu and not is_one_pass else out.numel()
        keeps = any(piece.data_ptr() == out.data_ptr() for piece in pieces[2:])
        scratch = torch.empty_like(out[:size]) if keeps else None
        chunks = zip(out.split(size), *(piece.split(size) for piece in pieces), strict=True)
        for chunk, *addends in chunks:
            _sum(chunk, addends, divisor, chunk if scratch is None else scratch[: len(chunk)])


def _sum_decoded(
    out: Tensor, codec: Codec, divisor: float, ranks: Sequence[Tensor] | Tensor, pieces: int = 1
) -> None:
    """``sum_in_rank_order`` of so many encoded pieces of each; on a device of all at once."""
    with torch.no_grad():
        if isinstance(ranks, Tensor) and not ranks.is_cpu:
            torch.sum(codec.decode(ranks, out.numel()), dim=0, dtype=out.dtype, out=out)
        else:
            out.zero_()
            for encoded in ranks:
                out.add_(codec.decode(rows_of(encoded, pieces), out.numel() // pieces).flatten())
        _divide(out, divisor)


def _sum(out: Tensor, addends: Sequence[Tensor], divisor: float, partial_sum: Tensor) -> None:
    """``partial_sum`` is memory for the sum of all but the last, such as ``out`` itself."""
    total, *rest = addends
    if not rest or total.dtype is not out.dtype:
        total = partial_sum.copy_(total)
    for addend in rest[:-1]:
        total = torch.add(total, addend, out=partial_sum)
    for last in rest[-1:]:
        if divisor != 1 and out.is_cpu and _may_scale(last, out, divisor):
            return _add_and_divide(out, total, last, divisor)
        torch.add(total, last, out=out)
    return _divide(out, divisor)


def _add_and_divide(out: Tensor, a: Tensor, b: Tensor, divisor: float) -> None:
    """``out`` = (a + b) / divisor, ``[n]``, in one pass over memory, with the bits of two passes.

    The kernel is that of an outer product, of 1 and ``b``: torch has no other for s * a + s * b.
    """
    if b.data_ptr() == out.data_ptr():
        a, b = b, a  # it may write to its first operand alone
    torch.addr(a[None], b.new_ones(1), b, beta=1 / divisor, alpha=1 / divisor, out=out[None])


def _divide(out: Tensor, divisor: float) -> None:
    """Divide in place; by a power of two multiply, which is faster and gives the same bits."""
    if divisor != 1:
        out.mul_(1 / divisor) if _is_exact(divisor) else out.div_(divisor)


def _may_scale(addend: Tensor, out: Tensor, divisor: float) -> bool:
    """May addends be divided in place of their sum? In fp16 that might overflow, and must."""
    return _is_exact(divisor) and addend.dtype is out.dtype is not torch.float16


def _is_exact(divisor: float) -> bool:
    """Is it a power of two, so that multiplying by its inverse only moves exponents?"""
    return math.frexp(divisor)[0] == 0.5
