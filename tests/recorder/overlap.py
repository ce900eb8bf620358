"""Overlap: how many units a device may compute while a collective is under way.

A unit ticks once, in the middle of its computation, in the forward and in the backward pass. It
may be computed beside a collective that has not waited for it, and for which it has not waited:
where the host runs ahead, these are the units between the issue of a collective and the wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.recorder.clocks import Clock, Stamp, Stream

__all__ = ["Flight", "Overlap"]


@dataclass
class Flight:
    """A collective, from its issue to the wait for it."""

    op: str
    axis: str
    nbytes: int  # of its larger side
    stamp: Stamp
    units: int  # that may be computed meanwhile


class Overlap:
    """The collectives of a step, and the units that are computed beside each."""

    def __init__(self, compute: Stream) -> None:
        self.flights = list[Flight]()
        self._compute, self._ticks = compute, list[Stamp]()

    def begin(self) -> None:
        """A step begins."""
        self.flights.clear()
        self._ticks.clear()

    def issue(self, op: str, axis: str, nbytes: int, stamp: Stamp, clock: Clock) -> None:
        """A collective is issued, which comes after what its ``clock`` knows."""
        units = sum(not clock.knows(tick) for tick in self._ticks)
        self.flights.append(Flight(op, axis, nbytes, stamp, units))

    def computes(self) -> None:
        """A unit is in the middle of its computation."""
        self._ticks.append(self._compute.stamp("unit"))
        for flight in self.flights:
            flight.units += not self._compute.clock.knows(flight.stamp)

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
