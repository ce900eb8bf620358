"""What a run of the benchmark says, as one frozen value that goes to JSON and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.checkpoint.memory import Extra
from benchmarks.checkpoint.rounds import Lap, Seen
from benchmarks.machine import Machine

__all__ = ["Report", "Row", "Times", "read", "rows_of", "write"]

SCHEMA = 1


@dataclass(frozen=True)
class Times:
    """Seconds of every round, of the slowest rank.

    Attributes:
        stall: until training may go on.
        save: until all is durable.
        alone: steps with nothing under way; empty where a way does not save later.
        meanwhile: as many steps after the stall.
        load: the files' bytes are in memory.
        cold: they are on the disk only; empty where they cannot be.
    """

    stall: tuple[float, ...]
    save: tuple[float, ...]
    alone: tuple[float, ...]
    meanwhile: tuple[float, ...]
    load: tuple[float, ...]
    cold: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """One way on one file system.

    Attributes:
        world: ranks.
        target: the kind of file system.
        way: a name in ``WAYS``.
        times: of the measured rounds.
        nbytes: of all files.
        from_disk: bytes that one cold load fetched, all ranks together, the median.
        save_collectives, load_collectives: the most of any rank.
        save_sent, load_sent: bytes, the most of any rank.
        save_memory, load_memory: beyond the state; ``None`` where not measured.
    """

    world: int
    target: str
    way: str
    times: Times
    nbytes: int
    from_disk: int
    save_collectives: int
    load_collectives: int
    save_sent: int
    load_sent: int
    save_memory: Extra | None = None
    load_memory: Extra | None = None


@dataclass(frozen=True)
class Report:
    """One run.

    Attributes:
        machine: where.
        gigabytes: of parameters and both moments, 10⁹ bytes, as they are.
        rounds: that were measured.
        bucket: bytes of our largest unit, whole.
        digest: of the state; every load brought back its bits, or there were no report.
        rows: way by way.
        schema: the version of this format.
    """

    machine: Machine
    gigabytes: float
    rounds: int
    bucket: int = 0
    digest: str = ""
    rows: tuple[Row, ...] = ()
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


def rows_of(seen: Sequence[Seen]) -> tuple[Row, ...]:
    """From every rank's laps."""
    return tuple(_row(len(seen), *key, [rank.laps[key] for rank in seen]) for key in seen[0].laps)


def _row(world: int, target: str, way: str, laps: list[list[Lap]]) -> Row:
    every = [lap for rank in laps for lap in rank]
    later = way.endswith("_async")
    cold = every[0].cold is not None
    times = Times(
        stall=_slowest(laps, "stall"),
        save=_slowest(laps, "save"),
        alone=_slowest(laps, "alone") if later else (),
        meanwhile=_slowest(laps, "meanwhile") if later else (),
        load=_slowest(laps, "load"),
        cold=_slowest(laps, "cold") if cold else (),
    )
    fetched = sorted(sum(rank[k].from_disk for rank in laps) for k in range(len(laps[0])))
    return Row(
        world=world,
        target=target,
        way=way,
        times=times,
        nbytes=max(lap.nbytes for lap in every),
        from_disk=fetched[len(fetched) // 2],
        save_collectives=max(lap.saving.collectives for lap in every),
        load_collectives=max(lap.loading.collectives for lap in every),
        save_sent=max(lap.saving.nbytes for lap in every),
        load_sent=max(lap.loading.nbytes for lap in every),
    )


def _slowest(laps: list[list[Lap]], name: str) -> tuple[float, ...]:
    return tuple(max(getattr(lap, name) for lap in each) for each in zip(*laps, strict=True))
