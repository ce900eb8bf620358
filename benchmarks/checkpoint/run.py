"""From what is asked to a report: which processes run, one after the other."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.checkpoint.measure import Task, measure
from benchmarks.checkpoint.memory import extra_memory
from benchmarks.checkpoint.report import Report, Row, rows_of
from benchmarks.checkpoint.state import BYTES, Size
from benchmarks.checkpoint.traffic import kind_of
from benchmarks.harness.machine import this_machine
from benchmarks.harness.workers import Workers

MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux has a file system in memory


@dataclass(frozen=True)
class Config:
    """What to measure."""

    worlds: tuple[int, ...] = (2,)  # numbers of ranks
    gigabytes: float = 1.1  # of state
    rounds: int = 5  # interleaved rounds
    # one on each file system; none: a temporary one, and one in memory if it fits
    folders: tuple[Path, ...] = ()
    memory: bool = True  # measure memory, too


def default_folders(gigabytes: float) -> tuple[Path, ...]:
    """Where temporary files go; and memory, where that is another file system with room."""
    disk = Path(tempfile.gettempdir())
    if not MEMORY.is_dir() or kind_of(disk) == kind_of(MEMORY):
        return (disk,)
    has_room = shutil.disk_usage(MEMORY).free > 4e9 * gigabytes
    return (disk, MEMORY) if has_room else (disk,)


Log = Callable[[str], None]
Save = Callable[[Report], None]


def run(config: Config, log: Log, save: Save) -> Report:
    """Measure; ``save`` is called with the report whenever there is more of it."""
    size = Size(config.gigabytes)
    params = sum(param.numel() for param in size.new_model().parameters())
    report = Report(this_machine(), BYTES * params / 1e9, config.rounds)
    for world in config.worlds:
        with _places(config) as places:
            kinds = ", ".join(places)
            log(f"{world} ranks, {report.gigabytes:.2f} GB, {config.rounds} rounds on {kinds}")
            task = Task(size, tuple(places.items()), config.rounds)
            with Workers(world, measure, task) as workers:
                measured = workers.receive()
            before, rows = report.rows, rows_of(measured)
            report = replace(report, digest=measured[0].digest, bucket=measured[0].bucket)
            report = replace(report, rows=(*before, *rows))
            save(report)
            if config.memory:
                log(f"{world} ranks: memory")
                first = next(iter(places.items()))
                rows = tuple(_with_memory(row, size, *first) for row in rows)
                report = replace(report, rows=(*before, *rows))
                save(report)
    return report


def _with_memory(row: Row, size: Size, target: str, place: str) -> Row:
    """On the first file system alone: what a rank holds does not depend on it."""
    if row.target != target:
        return row
    extra = extra_memory(row.method, size, row.world, Path(place))
    return replace(row, save_memory=extra["save"], load_memory=extra.get("load"))


@contextmanager
def _places(config: Config) -> Iterator[dict[str, str]]:
    """Kind of file system → a new folder on it, which goes afterwards."""
    made = {}
    try:
        for folder in config.folders or default_folders(config.gigabytes):
            made[kind_of(folder)] = tempfile.mkdtemp(dir=folder)
        yield made
    finally:
        for place in made.values():
            shutil.rmtree(place, ignore_errors=True)
