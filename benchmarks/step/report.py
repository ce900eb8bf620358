"""What a run measures, as one frozen value: tables, plots and JSON files are made from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.harness.machine import Machine
from benchmarks.harness.rounds import quartiles
from benchmarks.step.engines import PLAIN
from benchmarks.step.host import Host, Update
from benchmarks.step.measure import Lap, Measured
from benchmarks.step.memory import Memory


@dataclass(frozen=True)
class Times:
    """Of one engine; a step lasts until its slowest rank is done."""

    ratio: float  # median over rounds of this step ÷ the plain step of the same round
    low: float  # the lower quartile of these quotients
    high: float  # the upper one
    least_ratio: float  # the fastest step ÷ the fastest plain step
    median: float  # milliseconds
    least: float  # milliseconds
    compute: float  # milliseconds until the gradients are there, median
    update: float  # milliseconds of the optimizer, median
    rounds: int  # how many


@dataclass(frozen=True)
class Traffic:
    """Bytes per rank and step, the largest of all ranks."""

    sent: int  # that left the process, as the kernel counts them
    counted: int | None  # by the engine's own counters; ``None`` for rivals
    least: int  # that its strategy must send
    copied: int  # inside the process, beyond those that a plain step copies too
    params: int  # bytes of all parameters, for scale


@dataclass(frozen=True)
class Row:
    """One engine on one model."""

    model: str  # a name in ``TASKS``
    world: int  # ranks
    engine: str  # a name in ``ENGINES``
    absent: str = ""  # why there are no numbers; ``""`` where there are
    apart: bool = False  # measured in processes of its own, beside a plain step of its own
    losses: tuple[float, ...] = ()  # rank 0's, of the checked steps
    times: Times | None = None  # ``None`` where not measured; so are the others
    traffic: Traffic | None = None  # bytes sent and copied
    memory: Memory | None = None  # bytes held


@dataclass(frozen=True)
class Report:
    """One run."""

    machine: Machine  # where
    optimizer: str  # a name in ``OPTIMIZERS``, the same for all
    rows: tuple[Row, ...] = ()  # engine by engine
    hosts: tuple[Host, ...] = ()  # microseconds per unit
    updates: tuple[Update, ...] = ()  # milliseconds of the optimizer on many small parameters
    schema: int = 1  # the version of this format


def times_of(engine: str, measured: Sequence[Mapping[str, Measured]]) -> Times:
    """From every rank's laps."""
    mine, plain = _slowest(measured, engine), _slowest(measured, PLAIN)
    whole = [lap.whole for lap in mine]
    quotients = [lap / unit.whole for lap, unit in zip(whole, plain, strict=True)]
    low, middle, high = quartiles(quotients)
    return Times(
        ratio=middle,
        low=low,
        high=high,
        least_ratio=min(whole) / min(lap.whole for lap in plain),
        median=1e3 * median(whole),
        least=1e3 * min(whole),
        compute=1e3 * median(lap.compute for lap in mine),
        update=1e3 * median(lap.update for lap in mine),
        rounds=len(mine),
    )


def _slowest(measured: Sequence[Mapping[str, Measured]], engine: str) -> list[Lap]:
    rounds = zip(*(rank[engine].laps for rank in measured), strict=True)
    return [max(laps, key=lambda lap: lap.whole) for laps in rounds]


def traffic_of(
    engine: str, measured: Sequence[Mapping[str, Measured]], least: int, params: int
) -> Traffic:
    """From every rank's counts."""
    counted = [c for rank in measured if (c := rank[engine].counted) is not None]
    return Traffic(
        sent=max(rank[engine].sent for rank in measured),
        counted=max(counted) if counted else None,
        least=least,
        copied=max(rank[engine].copied - rank[PLAIN].copied for rank in measured),
        params=params,
    )
