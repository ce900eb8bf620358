"""Small programs as their users write them, each strategy beside DistributedDataParallel.

What decides here is not bandwidth: it is how many collectives a step has, and what each costs.
Nobody chooses units by hand; everything is what the engine chooses by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from benchmarks.harness.report import Cell, Column
from benchmarks.harness.rounds import paired, slowest
from benchmarks.harness.workers import on_ranks
from benchmarks.programs import PROGRAMS
from benchmarks.step.engines import Setup
from benchmarks.step.measure import Measured, measure

RIVAL = "ddp"
STRATEGIES = ("no_shard", "zero1", "full_shard")
NAMES = (RIVAL, *(f"{name}{over}" for name in STRATEGIES for over in ("_memory", "")))
COLUMNS = (
    Column("program"),
    Column("DDP ms", ".1f"),
    *(Column(name.replace("_memory", " memory"), ".2f") for name in NAMES[1:]),
)


def program_row(name: str, optimizer: str, world: int, rounds: int) -> tuple[Cell, ...]:
    """Return DDP's milliseconds, and each strategy's step ÷ DDP's of the same round."""
    ranks = on_ranks(world, measure, Setup(name, optimizer), NAMES, rounds)
    whole = {engine: _whole(ranks, engine) for engine in NAMES}
    ratios = (paired(whole[engine], whole[RIVAL])[1] for engine in NAMES[1:])
    return PROGRAMS[name].summary, 1e3 * median(whole[RIVAL]), *ratios


def _whole(ranks: Sequence[dict[str, Measured]], engine: str) -> list[float]:
    laps = slowest([rank[engine].laps for rank in ranks], lambda lap: lap.whole)
    return [lap.whole for lap in laps]
