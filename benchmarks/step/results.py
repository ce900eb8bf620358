"""What a run of the benchmark says, as one frozen value that goes to JSON and back.

Tables, plots and tests read this value; reading JSON back checks every field and type, so the
file's schema is this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from pydantic import TypeAdapter

from benchmarks.machine import Machine
from benchmarks.step.engines import PLAIN
from benchmarks.step.host import Host, Update
from benchmarks.step.memory import Memory
from benchmarks.step.rounds import Lap, Observed

__all__ = ["Report", "Row", "Times", "Traffic", "read", "times_of", "traffic_of", "write"]

SCHEMA = 1


@dataclass(frozen=True)
class Times:
    """Of one engine; a step lasts until its slowest rank is done.

    Attributes:
        ratio: median over rounds of this step ÷ the plain step of the same round.
        low: the lower quartile of these quotients.
        high: the upper one.
        least_ratio: the fastest step ÷ the fastest plain step.
        median: milliseconds.
        least: milliseconds.
        compute: milliseconds until the gradients are there, median.
        update: milliseconds of the optimizer, median.
        rounds: how many.
    """

    ratio: float
    low: float
    high: float
    least_ratio: float
    median: float
    least: float
    compute: float
    update: float
    rounds: int


@dataclass(frozen=True)
class Traffic:
    """Bytes per rank and step, the largest of all ranks.

    Attributes:
        sent: that left the process, as the kernel counts them.
        counted: by the engine's own counters; ``None`` for rivals.
        least: that its strategy must send.
        copied: inside the process, beyond those that a plain step copies too.
        params: bytes of all parameters, for scale.
    """

    sent: int
    counted: int | None
    least: int
    copied: int
    params: int


@dataclass(frozen=True)
class Row:
    """One engine on one model.

    Attributes:
        model: a name in ``TASKS``.
        world: ranks.
        engine: a name in ``ENGINES``.
        absent: why there are no numbers; ``""`` where there are.
        apart: measured in processes of its own, beside a plain step of its own.
        losses: rank 0's, of the checked steps.
        times: ``None`` where not measured; so are the others.
        traffic: bytes sent and copied.
        memory: bytes held.
    """

    model: str
    world: int
    engine: str
    absent: str = ""
    apart: bool = False
    losses: tuple[float, ...] = ()
    times: Times | None = None
    traffic: Traffic | None = None
    memory: Memory | None = None


@dataclass(frozen=True)
class Report:
    """One run.

    Attributes:
        machine: where.
        optimizer: a name in ``OPTIMIZERS``, the same for all.
        rows: engine by engine.
        hosts: microseconds per unit.
        updates: milliseconds of the optimizer on many small parameters.
        schema: the version of this format.
    """

    machine: Machine
    optimizer: str
    rows: tuple[Row, ...] = ()
    hosts: tuple[Host, ...] = ()
    updates: tuple[Update, ...] = ()
    schema: int = SCHEMA


ADAPTER = TypeAdapter(Report)


def write(report: Report, path: Path) -> None:
    """As JSON."""
    path.write_bytes(ADAPTER.dump_json(report, indent=2) + b"\n")


def read(path: Path) -> Report:
    """From JSON.

    Raises:
        ValueError: a field is missing, unknown, or of another type.
    """
    text = path.read_bytes()
    report = ADAPTER.validate_json(text, strict=True)
    if ADAPTER.dump_python(report, mode="json") != json.loads(text):
        raise ValueError(f"{path} has fields that a report of schema {SCHEMA} has not")
    return report


# ---- from what ranks saw -------------------------------------------------------------------


def times_of(engine: str, seen: Sequence[Mapping[str, Observed]]) -> Times:
    """From every rank's laps."""
    mine, plain = _slowest(seen, engine), _slowest(seen, PLAIN)
    whole = [lap.whole for lap in mine]
    quotients = [lap / unit.whole for lap, unit in zip(whole, plain, strict=True)]
    low, middle, high = quantiles(quotients, n=4, method="inclusive")
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


def _slowest(seen: Sequence[Mapping[str, Observed]], engine: str) -> list[Lap]:
    rounds = zip(*(rank[engine].laps for rank in seen), strict=True)
    return [max(laps, key=lambda lap: lap.whole) for laps in rounds]


def traffic_of(
    engine: str, seen: Sequence[Mapping[str, Observed]], least: int, params: int
) -> Traffic:
    """From every rank's counts."""
    counted = [c for rank in seen if (c := rank[engine].counted) is not None]
    return Traffic(
        sent=max(rank[engine].sent for rank in seen),
        counted=max(counted) if counted else None,
        least=least,
        copied=max(rank[engine].copied - rank[PLAIN].copied for rank in seen),
        params=params,
    )
