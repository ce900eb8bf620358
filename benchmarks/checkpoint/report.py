"""What a run measures, as one frozen value: tables and JSON files are made from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high

from benchmarks.checkpoint.measure import Lap, Measured
from benchmarks.checkpoint.memory import Extra
from benchmarks.harness.machine import Machine


@dataclass(frozen=True)
class Times:
    """Seconds of every round, of the slowest rank."""

    stall: tuple[float, ...]  # until training may go on
    save: tuple[float, ...]  # until all is durable
    alone: tuple[float, ...]  # steps with nothing under way; empty if the method is not async
    meanwhile: tuple[float, ...]  # as many steps after the stall
    load: tuple[float, ...]  # the files' bytes are in memory
    cold: tuple[float, ...]  # they are on the disk only; empty where they cannot be


@dataclass(frozen=True)
class Row:
    """One method on one file system."""

    world: int  # ranks
    target: str  # the kind of file system
    method: str  # a name in ``METHODS``
    times: Times  # of the measured rounds
    nbytes: int  # of all files
    from_disk: int  # bytes that one cold load fetched, all ranks together, the median
    save_collectives: int  # the most of any rank
    load_collectives: int
    save_sent: int  # bytes, the most of any rank
    load_sent: int
    save_memory: Extra | None = None  # beyond the state; ``None`` where not measured
    load_memory: Extra | None = None


@dataclass(frozen=True)
class Report:
    """One run."""

    machine: Machine  # where
    gigabytes: float  # of parameters and both moments, 10⁹ bytes, as they are
    rounds: int  # that were measured
    bucket: int = 0  # bytes of our largest unit, whole
    digest: str = ""  # of the state; every load brought back its bits, or there were no report
    rows: tuple[Row, ...] = ()  # method by method
    schema: int = 1  # the version of this format


def rows_of(measured: Sequence[Measured]) -> tuple[Row, ...]:
    """From every rank's laps."""
    ranks = [rank.laps for rank in measured]
    return tuple(_row(*key, [laps[key] for laps in ranks]) for key in ranks[0])


def _row(target: str, method: str, laps: list[list[Lap]]) -> Row:
    every = [lap for rank in laps for lap in rank]
    is_async = method.endswith("_async")
    times = Times(
        stall=_slowest(laps, "stall"),
        save=_slowest(laps, "save"),
        alone=_slowest(laps, "alone") if is_async else (),
        meanwhile=_slowest(laps, "meanwhile") if is_async else (),
        load=_slowest(laps, "load"),
        cold=() if every[0].cold is None else _slowest(laps, "cold"),
    )
    return Row(
        world=len(laps),
        target=target,
        method=method,
        times=times,
        nbytes=max(lap.nbytes for lap in every),
        from_disk=median_high(
            sum(lap.from_disk for lap in each) for each in zip(*laps, strict=True)
        ),
        save_collectives=max(lap.saving.collectives for lap in every),
        load_collectives=max(lap.loading.collectives for lap in every),
        save_sent=max(lap.saving.nbytes for lap in every),
        load_sent=max(lap.loading.nbytes for lap in every),
    )


def _slowest(laps: list[list[Lap]], name: str) -> tuple[float, ...]:
    return tuple(max(getattr(lap, name) for lap in each) for each in zip(*laps, strict=True))
