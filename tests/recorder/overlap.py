"""Overlap: how many units a device computes between the issue of a collective and the wait for it.

A unit ticks once, in the middle of its computation, in the forward and in the backward pass. A
collective is waited for once the stream that computes comes after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.recorder.clocks import Stamp, Stream

__all__ = ["Flight", "Overlap"]


@dataclass
class Flight:
    """A collective, from its issue to the wait for it."""

    op: str
    ranks: int
    nbytes: int  # of its larger side
    phase: str
    stamp: Stamp
    units: int = 0  # computed since it was issued


class Overlap:
    """The collectives of a step, and the units that are computed beside each."""

    def __init__(self, compute: Stream) -> None:
        self.phase, self.flights = "", list[Flight]()
        self._compute, self._open = compute, list[Flight]()

    def issue(self, op: str, ranks: int, nbytes: int, stamp: Stamp) -> None:
        """A collective is issued."""
        self.flights.append(Flight(op, ranks, nbytes, self.phase, stamp))
        self._open.append(self.flights[-1])

    def computes(self) -> None:
        """A unit is in the middle of its computation."""
        self._open = [one for one in self._open if not self._compute.clock.knows(one.stamp)]
        for flight in self._open:
            flight.units += 1

    def watch(self, module: nn.Module) -> None:
        """A unit ticks where the output of ``module`` is used, and where its gradient comes."""
        tick: Any = _Tick.apply
        module.register_forward_hook(lambda _, __, out: tick(out, self))


class _Tick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, overlap: Overlap) -> Tensor:
        ctx.overlap = overlap
        overlap.computes()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.overlap.computes()
        return grad, None
