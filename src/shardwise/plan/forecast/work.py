"""Work of one training step, as values: what each unit computes, moves and keeps in memory.

The work is that of one rank and one micro-batch, and is the same for every strategy. ``observe``
measures it without computing anything; the forecasts of memory and time only read it.

    forward    span 0 │ cue 0 │ span 1 │ cue 1 │ … │ cue n-1 │ span n (the loss)
    backward   span n │ cue 0 │ …                  │ cue n-1 │ span 0

A *span* is what happens between two neighbouring cues of a schedule. It belongs to the innermost
unit whose call is under way, or to none. Memory is counted in bytes of storages, so views count
once; parameters, their gradients, buffers and the batch are not among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardwise.plan.schedule.events import Order


@dataclass(frozen=True)
class Product:
    """``batch`` products of matrices, ``[m, k] x [k, n]`` each.

    Attributes:
        itemsize: bytes of an element.
        kind: ``"attention"``: inside one kernel, which reads and writes no scores; ``"conv"``: a
            convolution as a product, ``m`` places, ``n`` channels, ``k`` elements of a filter.
        causal: a kernel may leave out nearly half of it; ``flops`` counts all, as is usual.
        aligned: bytes, 16 at most, of whose multiples rows of all three matrices begin at.
    """

    m: int
    n: int
    k: int
    batch: int
    itemsize: int
    kind: Literal["matmul", "attention", "conv"] = "matmul"
    causal: bool = False
    aligned: int = 16

    @property
    def flops(self) -> int:
        """Floating-point operations; a multiplication and an addition are two."""
        return 2 * self.m * self.n * self.k * self.batch


@dataclass(frozen=True)
class Pass:
    """Kernels that run one after the other.

    Attributes:
        products: each with the number of times it runs.
        moved: bytes that every other kernel reads and writes.
        kernels: all of them, products included; views are none.
        gradients: of parameters that train, each when it comes.
    """

    products: tuple[tuple[Product, int], ...] = ()
    moved: int = 0
    kernels: int = 0
    gradients: int = 0

    @property
    def flops(self) -> int:
        """Floating-point operations of the products."""
        return sum(product.flops * times for product, times in self.products)


MMAP_THRESHOLD = 1 << 25
"""Bytes from which glibc maps each block by itself, and unmaps it when it is freed (mallopt(3)); a
layer may set another: its ``maps_from``."""


class Level(NamedTuple):
    """Bytes alive at the end of a span, and at most, above those alive at its start."""

    grown: int = 0
    peak: int = 0

    def then(self, other: Level) -> Level:
        """Join two that follow one another."""
        return Level(self.grown + other.grown, max(self.peak, self.grown + other.peak))


NOTHING = Level()


@dataclass(frozen=True)
class Span:
    """Memory between two cues.

    Attributes:
        unit: the innermost unit whose call is under way; ``None``: none is.
        grown: bytes alive at its end, less those alive at its start.
        peak: bytes alive at most, above those alive at its start.
        in_host: ``grown`` of what checkpointing keeps in host memory, which is not in ``grown``.
        blocks, mapped: of storages below the threshold, and of the others.
        freed: bytes of the former that it made and freed, of the largest size of these.
        holes: bytes of blocks that the forward pass has freed and no smaller ones have filled.
    """

    unit: str | None
    grown: int
    peak: int
    in_host: int = 0
    blocks: Level = NOTHING
    mapped: Level = NOTHING
    freed: int = 0
    holes: int = 0

    def then(self, other: Span) -> Span:
        """Both, as one span of the first one's unit."""
        level = Level(self.grown, self.peak).then(Level(other.grown, other.peak))
        blocks, mapped = self.blocks.then(other.blocks), self.mapped.then(other.mapped)
        in_host, freed = self.in_host + other.in_host, self.freed + other.freed
        return Span(self.unit, *level, in_host, blocks, mapped, freed, self.holes + other.holes)


@dataclass(frozen=True)
class UnitWork:
    """Work of one unit in one step, all of its calls, without the units inside it.

    Attributes:
        unit: its name.
        forward, backward: its kernels.
        recomputed: the part of ``backward`` that repeats ``forward``.
        saved: bytes that it has made and that are kept from the forward to the backward pass.
        in_host: bytes that are kept in host memory from the forward to the backward pass.
    """

    unit: str
    forward: Pass
    backward: Pass
    recomputed: Pass
    saved: int
    in_host: int = 0


@dataclass(frozen=True)
class StepWork:
    """Work of one step of a model.

    Attributes:
        units: each unit's, by name, in order of the first use.
        rest: what no unit does: modules without parameters around them, and the loss.
        tokens: elements of the first input of rows of integers of one micro-batch, or else rows.
        counted: which of them.
        order: the cues between the spans; those of calls without a backward pass only forward.
        forward, backward: the spans, one more than cues.
        first_gradients: for each unit that trains, by the name of each of its parameters, the span
            of ``backward`` with its first one.
        inputs: bytes of the batch.
        buffers: bytes of the model's buffers.
    """

    units: Mapping[str, UnitWork]
    rest: UnitWork
    tokens: int
    counted: Literal["tokens", "rows"]
    order: Order
    forward: tuple[Span, ...]
    backward: tuple[Span, ...]
    first_gradients: Mapping[str, Mapping[str, int]]
    inputs: int
    buffers: int

    @property
    def flops(self) -> int:
        """Floating-point operations, without what is recomputed."""
        every = (*self.units.values(), self.rest)
        return sum(u.forward.flops + u.backward.flops - u.recomputed.flops for u in every)

    @property
    def saved(self) -> int:
        """Bytes kept from the forward to the backward pass."""
        return sum(unit.saved for unit in (*self.units.values(), self.rest))
