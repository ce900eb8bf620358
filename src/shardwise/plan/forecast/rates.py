"""Seconds of kernels on one accelerator: a roofline whose roof depends on the size of a product.

For each kind of kernel:

    product      FLOP / (promised x reached), longer by a share that grows as m, n or k is small
    attention    the same, with a rate of its own that depends on the head's size and the length
    the others   bytes moved / bandwidth, as the work has them: few if it is of few kernels
    host         the number of kernels, and who starts them; it bounds what is smaller
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shardwise.plan.forecast.machine import Accelerator, Constants
from shardwise.plan.forecast.work import Pass, Product

# Of the rate of FlashAttention-2 (Dao 2023, arXiv 2307.08691, figure 5): its first version.
FLASH1 = 0.65
# FLOP for each clock of a multiprocessor where tiles are loaded in pieces of so many bytes, by an
# A100's 93, 150 and 150 TFLOP/s at 4,096 (thonking.ai, "What Shapes Do Matrix Multiplications
# Like?"). Tensor cores of later devices are faster, but their loads are not: 98 TFLOP/s of an H100
# at 1.2 GHz with pieces of 8 bytes (github.com/m87-labs/kestrel, pull request 143) are 620.
PIECES = {2: 611, 4: 985, 8: 985}
CAST = 3  # bytes to make an element of bf16 one of fp8: 2 are read, 1 is written; weights stay so
AttentionKernel = Literal["flash1", "flash2", "fastest"]


@dataclass(frozen=True)
class Kernels:
    """The software that computes.

    Attributes:
        compiled: a graph starts them, of ``torch.compile`` or XLA, and not Python.
        attention: the kernels for attention; torch's own are FlashAttention-2.
        precision: of the products in the units named by ``narrow``; elsewhere ``"bf16"``.
        narrow: names of units whose products are in ``precision``.
    """

    compiled: bool = False
    attention: AttentionKernel = "flash2"
    precision: Literal["bf16", "fp8", "fp4"] = "bf16"
    narrow: frozenset[str] = frozenset()


EAGER = Kernels()  # torch, as it is


@dataclass(frozen=True)
class Seconds:
    """Time of a pass, by what it is spent on."""

    products: float = 0.0
    attention: float = 0.0
    moved: float = 0.0
    host: float = 0.0  # of the host, beside the device
    waits: bool = False  # the host's time adds to the device's, or else is hidden by it

    @cached_property
    def device(self) -> float:
        return self.products + self.attention + self.moved

    @cached_property
    def total(self) -> float:
        return self.device + self.host if self.waits else max(self.device, self.host)

    @property
    def bound(self) -> str:
        """The part that takes most of it."""
        if self.host > self.device:
            return "host"
        parts = {"products": self.products, "attention": self.attention, "memory": self.moved}
        return max(parts, key=lambda name: parts[name])

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.products + other.products,
            self.attention + other.attention,
            self.moved + other.moved,
            self.host + other.host,
            self.waits or other.waits,
        )

    def __truediv__(self, parts: float) -> Seconds:
        products, attention = self.products / parts, self.attention / parts
        return Seconds(products, attention, self.moved / parts, self.host / parts, self.waits)


@dataclass(frozen=True)
class Rates:
    """An accelerator with the software that computes on it."""

    accelerator: Accelerator
    kernels: Kernels
    constants: Constants

    @property
    def contention(self) -> float:
        """The accelerator's own, or that of ``Constants``."""
        return self._own("contention")

    def _own(self, name: Literal["small", "contention", "short", "narrow"]) -> float:
        own: float | None = getattr(self.accelerator, name)
        common: float = getattr(self.constants, name)
        return common if own is None else own

    @property
    def call(self) -> Seconds:
        """Time of the engine for one call of a unit in one pass."""
        return Seconds(host=self.accelerator.unit / 2, waits=self.accelerator.waits)

    def seconds(self, work: Pass, unit: str | None = None, written: int = 0) -> Seconds:
        """Time of ``work``, a pass of ``unit``, of whose kernels Python starts ``written``."""
        narrow = unit in self.kernels.narrow and self.kernels.precision != "bf16"
        products = attention = cast = 0.0
        for product, times in work.products:
            if product.kind == "attention":
                attention += times * self._attention(product)
            else:
                products += times * self._product(product, narrow)
                cast += times * product.batch * product.m * product.k * narrow * CAST
        return Seconds(
            products,
            attention,
            (work.moved + cast) / (self.accelerator.bandwidth * self.constants.bandwidth),
            self._host(work, written),
            self.accelerator.waits,
        )

    def _host(self, work: Pass, written: int) -> float:
        """Seconds to start kernels, and the engine's for gradients."""
        accelerator = self.accelerator
        slow = 0 if self.kernels.compiled or accelerator.waits else written
        started = slow * accelerator.python + (work.kernels - slow) * accelerator.kernel
        return started + work.gradients * accelerator.parameter

    def _product(self, product: Product, narrow: bool) -> float:
        precision = self.kernels.precision if narrow else _PRECISIONS[product.itemsize]
        rate = self.accelerator.peak(precision) * self.accelerator.products
        edges = 1 / product.m + 1 / product.n + 1 / product.k
        seconds = product.flops / rate * (1 + self._own("small") * edges)
        if product.itemsize != 2 or product.aligned == 16 or not self.accelerator.clocks:
            return seconds
        loaded = product.flops / (PIECES[product.aligned] * self.accelerator.clocks)
        return max(seconds, min(loaded, seconds + self._padding(product)))

    def _padding(self, product: Product) -> float:
        """Seconds to copy the largest of the three matrices, as compilers do to align its rows."""
        m, n, k = product.m, product.n, product.k
        moved = 2 * product.batch * max(m * n, m * k, n * k) * product.itemsize
        bandwidth = self.accelerator.bandwidth * self.constants.bandwidth
        return moved / bandwidth if self.kernels.compiled else math.inf

    def _attention(self, product: Product) -> float:
        """Seconds of scores or of their mixture; ``m`` is the number of queries."""
        accelerator = self.accelerator
        rate = accelerator.peak(_PRECISIONS[product.itemsize]) * accelerator.attention
        rate *= {"flash1": FLASH1 * accelerator.flash2, "flash2": accelerator.flash2}.get(
            self.kernels.attention, 1
        )
        size, length = sorted((product.n, product.k))
        edges = (1 + self._own("short") / length) * (1 + self._own("narrow") / size)
        return product.flops / (1 + product.causal) / rate * edges


_PRECISIONS = {1: "fp8", 2: "bf16", 4: "fp32", 8: "fp32"}
