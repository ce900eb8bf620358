"""Machines by name: what a rank computes on, and the links to the others.

The numbers and their sources are in ``machines.toml``. A file of the same form, such as the one
that a calibration writes, adds entries of its own.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from shardwise.errors import ConfigError, nearest

TABLE = Path(__file__).with_name("machines.toml")
Bytes = TypeVar("Bytes", int, float)
REACHED = 0.9  # of a link's rate, where only that is known
RATE = re.compile(r"(\d[\d,]*\.?\d*) ?([mgMG])(?:(B)|b|(?i:bit))(?:/s|ps)")  # B: bytes


@dataclass(frozen=True)
class Link:
    """A network between ranks.

    Attributes:
        bandwidth: bytes per second that one rank sends in a large collective; between hosts,
            all ranks of a host together.
        latency: seconds that each further rank adds to a collective.
    """

    name: str
    bandwidth: float
    latency: float
    source: str


@dataclass(frozen=True)
class Accelerator:
    """A device, as one rank computes on it.

    Attributes:
        bf16, fp8, fp4, fp32: FLOP/s of dense products that the vendor promises; 0: it has none.
        products: the part of it that large products reach in a training step.
        attention: the part of ``bf16`` that fused attention reaches with its fastest kernels.
        best: the part of the promised rate that one large product reaches on its own.
        memory, bandwidth: bytes, and bytes per second.
        inside, between, host: names of the links in a host, between hosts, and to a host's memory.
        per_host: ranks of a usual host.
        flash2: the speed of FlashAttention-2 beside the fastest kernels for attention.
        kernel: seconds of the host to start one kernel.
        python: the same where Python starts it, and not a compiled graph or autograd.
        waits: the host waits for each kernel, as on CPUs, so ``kernel`` adds to its time.
        device: what torch calls it.
        reserved: bytes of it that hold neither model nor engine: context, libraries, communicators.
        kept: of a CPU, the part of activations that the C library has in holes beside them.
        recomputing: bytes of libraries that a process loads where units are recomputed.
        host_memory: bytes of a usual host's memory.
        clocks: its multiprocessors times their clock, in Hz, where rows that do not begin at
            multiples of 16 bytes are loaded in pieces; 0: it does not matter where they begin.
        small, contention, short, narrow: as in ``Constants``, which they replace where they are not
            ``None``.
        step, unit, parameter: seconds of the host that the engine and its optimizer take for a
            step, for two calls (of a unit or what is in none, a forward and a backward one), and
            for each gradient.
    """

    name: str
    bf16: float
    products: float
    attention: float
    memory: float
    bandwidth: float
    inside: str
    between: str
    source: str
    fp8: float = 0.0
    fp4: float = 0.0
    fp32: float = 0.0
    best: float = 0.8
    per_host: int = 8
    host: str = "PCIe 4"
    flash2: float = 1.0
    kernel: float = 6e-6
    python: float = 25e-6
    waits: bool = False
    clocks: float = 0.0
    small: float | None = None
    contention: float | None = None
    short: float | None = None
    narrow: float | None = None
    step: float = 0.0
    unit: float = 0.0
    parameter: float = 0.0
    aliases: tuple[str, ...] = ()
    device: str = "cuda"
    reserved: int = 1_500_000_000
    kept: float | None = None
    recomputing: int = 0
    host_memory: float = 1e12

    def within(self, in_host: Bytes) -> Bytes:
        """Bytes of host memory that are the device's own: a CPU's are."""
        return in_host * (self.device == "cpu")

    def beside(self, in_host: Bytes) -> Bytes:
        """Bytes of host memory that are beside the device."""
        return in_host - self.within(in_host)

    def peak(self, precision: str) -> float:
        """FLOP/s that the vendor promises.

        Raises:
            ConfigError: it cannot compute in ``precision``.
        """
        rate: float = getattr(self, precision)
        if not rate:
            has = [name for name in ("fp32", "bf16", "fp8", "fp4") if getattr(self, name)]
            raise ConfigError(
                f"{self.name} has no products in {precision}, so no step could be taken. "
                f"It has {', '.join(has)}."
            )
        return rate


@dataclass(frozen=True)
class Constants:
    """Constants of all machines, fitted on published results: see ``machines.toml``."""

    bandwidth: float
    small: float
    contention: float
    short: float
    narrow: float


@dataclass(frozen=True)
class Error:
    """Relative errors of forecasts: a middle one, and the largest of nine in ten."""

    middle: float
    most: float


@dataclass(frozen=True)
class Machine:
    """Ranks that train together: ``per_host`` in each host, all alike."""

    accelerator: Accelerator
    inside: Link
    between: Link
    host: Link  # from a device to its host's memory
    per_host: int

    def filled(self, nbytes: float, in_host: float, ranks: int) -> float:
        """The part of its device that a rank fills, or of host memory that a host's ranks do.

        Args:
            nbytes: of one rank on its device, beside what is reserved.
            in_host: of one rank in host memory.
        """
        own = self.accelerator
        of_device = (nbytes + own.reserved) / own.memory
        if not in_host:
            return of_device
        of_host = in_host * min(self.per_host, ranks)
        return max(of_device, of_host / own.host_memory if own.host_memory else math.inf)


@dataclass(frozen=True)
class Table:
    """Accelerators and links by name.

    Attributes:
        errors: by what is known: ``"seen"``: published results of the same source;
            ``"calibrated"``: one measurement on the same machine; ``"unseen"``: neither.
            ``"memory"``: of peaks; ``"process"``: of those of a process on CPU.
    """

    accelerators: Mapping[str, Accelerator]
    links: Mapping[str, Link]
    constants: Constants
    errors: Mapping[str, Error]

    @classmethod
    def read(cls, path: Path = TABLE) -> Table:
        """Read a file of the form of ``machines.toml``, or JSON; its own entries only.

        Raises:
            ConfigError: it is none.
        """
        try:
            text = path.read_text("utf-8")
            return cls._of(json.loads(text) if path.suffix == ".json" else tomllib.loads(text))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ConfigError(
                f"{path} holds no machines that can be read: {error}. `shardwise plan --calibrate "
                "here.toml` writes such a file."
            ) from error

    @classmethod
    def _of(cls, entries: Mapping[str, Any]) -> Table:
        accelerators = {
            name: Accelerator(name, **entry | {"aliases": tuple(entry.get("aliases", ()))})
            for name, entry in entries.get("accelerators", {}).items()
        }
        links = {name: Link(name, **entry) for name, entry in entries.get("links", {}).items()}
        if "constants" not in entries:
            return cls(accelerators, links, known().constants, known().errors)
        errors = {name: Error(**entry) for name, entry in entries["errors"].items()}
        return cls(accelerators, links, Constants(**entries["constants"]), errors)

    def with_file(self, path: Path) -> Table:
        """This table and the entries of a file, which replace those of the same name."""
        own = Table.read(path)
        accelerators, links = {**self.accelerators, **own.accelerators}, {**self.links, **own.links}
        return replace(self, accelerators=accelerators, links=links)

    def accelerator(self, name: str) -> Accelerator:
        """The accelerator of this name or alias.

        Raises:
            ConfigError: none has it.
        """
        names = {alias: a for a in self.accelerators.values() for alias in (a.name, *a.aliases)}
        return _by_name("accelerator", name, names)

    def link(self, name: str) -> Link:
        """The link of this name; ``"400 Gb/s"`` and ``"50 GB/s"``, in bytes, are of that rate.

        Raises:
            ConfigError: none has it.
        """
        rate = RATE.fullmatch(name.strip())
        size = (1e9 if rate[2] in "gG" else 1e6) * (8 if rate[3] else 1) if rate else 0
        bits = float(rate[1].replace(",", "")) * size if rate else 0
        if not bits:
            return _by_name("link", name, self.links, "; a rate such as 400Gb/s serves, too")
        return Link(f"{bits / 1e9:g} Gb/s", bits / 8 * REACHED, 1e-5, f"its name, {REACHED} of it")

    def machine(
        self,
        accelerator: str,
        per_host: int | None = None,
        inside: str | None = None,
        between: str | None = None,
    ) -> Machine:
        """Ranks on ``accelerator``; what is left out is as in its usual host."""
        chosen = self.accelerator(accelerator)
        return Machine(
            chosen,
            self.link(inside or chosen.inside),
            self.link(between or chosen.between),
            self.link(chosen.host),
            per_host or chosen.per_host,
        )


@cache
def known() -> Table:
    """``machines.toml``."""
    return Table.read()


Entry = TypeVar("Entry")


def _by_name(kind: str, name: str, entries: Mapping[str, Entry], otherwise: str = "") -> Entry:
    same = {_plain(known): entry for known, entry in entries.items()}
    if _plain(name) in same:
        return same[_plain(name)]
    raise ConfigError(
        f"no {kind} is called {name!r}, so its speed is not known. "
        f"The nearest is {nearest(name, entries, 1)[0]!r}{otherwise}."
    )


def _plain(name: Any) -> str:
    """Spaces, dashes and capitals do not tell names apart."""
    return re.sub(r"[^a-z0-9]", "", str(name).lower())
