"""What a run of the benchmark says, as one frozen value that goes to JSON and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.checkpoint.memory import Extra
from benchmarks.checkpoint.rounds import Lap, Seen
from benchmarks.harness.machine import Machine


@dataclass(frozen=True)
class Times:
    """Seconds of every round, of the slowest rank."""

    stall: tuple[float, ...]  # until training may go on
    save: tuple[float, ...]  # until all is durable
    alone: tuple[float, ...]  # steps with nothing under way; empty where a way does not save later
    meanwhile: tuple[float, ...]  # as many steps after the stall
    load: tuple[float, ...]  # the files' bytes are in memory
    cold: tuple[float, ...]  # they are on the disk only; empty where they cannot be


@dataclass(frozen=True)
class Row:
    """One way on one file system."""

    world: int  # ranks
    target: str  # the kind of file system
    way: str  # a name in ``WAYS``
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
    rows: tuple[Row, ...] = ()  # way by way
    schema: int = 1  # the version of this format


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
