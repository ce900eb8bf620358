"""From what is asked to a report: which processes run, one after the other."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.checkpoint.memory import extra_memory
from benchmarks.checkpoint.results import Report, Row, rows_of
from benchmarks.checkpoint.rounds import Task, observe
from benchmarks.checkpoint.state import BYTES, Size
from benchmarks.checkpoint.traffic import kind_of
from benchmarks.checkpoint.ways import WAYS
from benchmarks.crew import Crew
from benchmarks.machine import this_machine

__all__ = ["Wanted", "default_folders", "run"]

MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux has a file system in memory


@dataclass(frozen=True)
class Wanted:
    """What to measure.

    Attributes:
        worlds: numbers of ranks.
        gigabytes: of state.
        rounds: interleaved rounds.
        folders: one on each file system; none: a temporary one, and one in memory if it fits.
        memory: measure memory, too.
    """

    worlds: tuple[int, ...] = (2,)
    gigabytes: float = 1.1
    rounds: int = 5
    folders: tuple[Path, ...] = ()
    memory: bool = True


def default_folders(gigabytes: float) -> tuple[Path, ...]:
    """Where temporary files go; and memory, where that is another file system with room."""
    disk = Path(tempfile.gettempdir())
    if not MEMORY.is_dir() or kind_of(disk) == kind_of(MEMORY):
        return (disk,)
    has_room = shutil.disk_usage(MEMORY).free > 4e9 * gigabytes
    return (disk, MEMORY) if has_room else (disk,)


Say = Callable[[str], None]
Keep = Callable[[Report], None]


def run(wanted: Wanted, say: Say, keep: Keep) -> Report:
    """Measure.

    Args:
        wanted: what.
        say: hears what is done now.
        keep: is handed the report whenever there is more of it.
    """
    size = Size(wanted.gigabytes)
    params = sum(param.numel() for param in size.new_model().parameters())
    report = Report(this_machine(), BYTES * params / 1e9, wanted.rounds)
    for world in wanted.worlds:
        with _places(wanted) as places:
            before = report
            kinds = ", ".join(places)
            say(f"{world} ranks, {report.gigabytes:.2f} GB, {wanted.rounds} rounds on {kinds}")
            task = Task(size, tuple(WAYS), tuple(places.items()), wanted.rounds)
            with Crew(world, observe, task) as crew:
                seen = crew.hear()
            rows = rows_of(seen)
            report = replace(report, digest=seen[0].digest, bucket=seen[0].bucket)
            report = replace(report, rows=(*before.rows, *rows))
            keep(report)
            if wanted.memory:
                rows = _with_memory(rows, size, next(iter(places.items())), say)
                report = replace(report, rows=(*before.rows, *rows))
                keep(report)
    return report


def _with_memory(
    rows: tuple[Row, ...], size: Size, place: tuple[str, str], say: Say
) -> tuple[Row, ...]:
    """On the first file system alone: what a rank holds does not depend on it."""
    found = []
    for row in rows:
        if row.target == place[0]:
            say(f"{row.world} ranks, memory: {row.way}")
            extra = extra_memory(row.way, size, row.world, Path(place[1]))
            changed = replace(row, save_memory=extra["save"], load_memory=extra.get("load"))
            found.append(changed)
        else:
            found.append(row)
    return tuple(found)


@contextmanager
def _places(wanted: Wanted) -> Iterator[dict[str, str]]:
    """Kind of file system → a new folder on it, which goes afterwards."""
    made = {}
    try:
        for folder in wanted.folders or default_folders(wanted.gigabytes):
            made[kind_of(folder)] = tempfile.mkdtemp(dir=folder)
        yield made
    finally:
        for place in made.values():
            shutil.rmtree(place, ignore_errors=True)
