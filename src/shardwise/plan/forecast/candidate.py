"""Candidates: settings that a run could have, for ``shard()`` and for a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from shardwise.config.checkpointing import ActivationCheckpointing
from shardwise.config.strategies import PRESETS

Offload = Literal["none", "optimizer", "everything"]
WIRES = ("float32", "bfloat16", "int8")
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "everything")
RECOMPUTED = {0: "nothing recomputed", 1: "blocks recomputed", 2: "every second block recomputed"}


@dataclass(frozen=True)
class Candidate:
    """One choice for everything that a search may choose.

    Attributes:
        strategy, mesh, offload: as of ``shard()``.
        micro_batch: rows that a rank computes at a time.
        recompute: 0 = no block; n = every n-th.
        unsharded: the part of all full buckets that may stay, in bytes of them.
        prefetch: how many of the largest units are gathered ahead.
        wire, computes: dtypes in which gradients travel, and of gathered parameters; ``None``: as
            asked.
        written: names and values of further arguments of ``shard()``, in place of those of fields.
    """

    strategy: str
    micro_batch: int
    mesh: tuple[int, int] | None = None
    recompute: int = 0
    offload: Offload = "none"
    unsharded: float = 0.0
    prefetch: int = 1
    wire: str | None = None
    computes: str | None = None
    written: tuple[tuple[str, Any], ...] = ()

    @property
    def checkpointing(self) -> ActivationCheckpointing | None:
        """Return the option of ``shard()``; ``None``: nothing is recomputed."""
        if not self.recompute:
            return None
        usual = ActivationCheckpointing(every=self.recompute)
        written: ActivationCheckpointing = dict(self.written).get("activation_checkpointing", usual)
        return written

    @property
    def recipe(self) -> dict[str, Any]:
        """The keys of a recipe that set it, with names in full, but for numbers of bytes."""
        keys: dict[str, Any] = {"sharding.strategy": self.strategy}
        keys["batch.micro"] = self.micro_batch
        every = self.recompute
        keys["sharding.activation_checkpointing"] = every if every > 1 else bool(every)
        keys["sharding.offload"] = self.offload
        if self.mesh:
            keys["sharding.mesh"] = list(self.mesh)
        if self.wire:
            keys["sharding.precision.reduce_dtype"] = self.wire
        if self.computes:
            keys["sharding.precision.param_dtype"] = self.computes
        return keys

    def __str__(self) -> str:
        words = [self.strategy + (f" {self.mesh[0]} x {self.mesh[1]}" if self.mesh else "")]
        words += [f"{self.micro_batch} row{'s' * (self.micro_batch != 1)}"]
        words += [RECOMPUTED[self.recompute]]
        if self.offload != "none":
            words += [f"{self.offload} offloaded"]
        if self.unsharded:
            words += [f"{self.unsharded:.0%} unsharded"]
        if self.prefetch != 1:
            words += [f"{self.prefetch} units ahead" if self.prefetch else "no prefetch"]
        words += [f"{name} as written" for name, _ in self.written]
        if self.wire:
            words += [f"gradients sent in {self.wire}"]
        if self.computes:
            words += [f"computed in {self.computes}"]
        return ", ".join(words)


def candidates(
    ranks: int,
    per_host: int,
    micro_batches: Sequence[int],
    frozen: bool = False,
    wires: Sequence[str | None] = (None,),
) -> Iterator[Candidate]:
    """All that are worth asking about on ``ranks`` ranks in hosts of ``per_host``.

    Args:
        micro_batches: rows that a rank may compute at a time.
        frozen: most parameters are, so it may pay that they stay unsharded.
        wires: dtypes in which gradients may travel.
    """
    for strategy, mesh in _meshes(ranks, per_host):
        placement = PRESETS[strategy]
        choices = product(
            (0, 1, 2) if placement.frees else (1,),
            (0.0, 1.0) if placement.frees and frozen else (0.0,),
            OFFLOADS if placement.splits else OFFLOADS[:1],
            RECOMPUTED,
            micro_batches,
            wires,
        )
        for prefetch, unsharded, offload, recompute, rows, wire in choices:
            yield Candidate(strategy, rows, mesh, recompute, offload, unsharded, prefetch, wire)


def _meshes(ranks: int, per_host: int) -> Iterator[tuple[str, tuple[int, int] | None]]:
    """Each strategy, a hybrid with each number of whole hosts that divides all of them."""
    for name, placement in PRESETS.items():
        if not placement.hybrid:
            yield name, None
            continue
        shards = per_host
        while shards < ranks:
            if ranks % shards == 0:
                yield name, (ranks // shards, shards)
            shards *= 2


def savings(chosen: Candidate) -> Iterator[tuple[str, Candidate]]:
    """Yield what to change about ``chosen`` so that it takes less memory: one thing at a time."""
    if chosen.recompute != 1:
        yield "recompute every block", replace(chosen, recompute=1)
    if chosen.recompute == 0:
        yield "recompute every second block", replace(chosen, recompute=2)
    divisors = [n for n in range(1, chosen.micro_batch) if chosen.micro_batch % n == 0]
    for rows in sorted({*divisors[:1], *divisors[-1:]}, reverse=True):  # others may not divide
        yield f"{rows} row{'s' * (rows != 1)} at a time", replace(chosen, micro_batch=rows)
    if chosen.strategy != "full_shard":
        yield "strategy full_shard", replace(chosen, strategy="full_shard", mesh=None)
    written = tuple((name, value) for name, value in chosen.written if name != "unsharded")
    if chosen.unsharded or written != chosen.written:
        yield "no unit unsharded", replace(chosen, unsharded=0.0, written=written)
    if chosen.prefetch:
        yield "no prefetch", replace(chosen, prefetch=0)
    for offload in OFFLOADS:  # less of it saves host memory
        if offload != chosen.offload:
            what = "nothing" if offload == "none" else offload
            yield f"offload {what}", replace(chosen, offload=offload)
