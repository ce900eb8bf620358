"""Which processes run, one after the other, and the tables that come of what they measured."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.checkpoint.files import kind_of
from benchmarks.checkpoint.measure import Lap, Measured, Task, extra_memory, measure
from benchmarks.checkpoint.methods import METHODS, is_async, synchronous
from benchmarks.checkpoint.trained import BYTES, Size
from benchmarks.harness.command import Log, setting
from benchmarks.harness.machine import this_machine
from benchmarks.harness.report import MIB, Cell, Column, Report, Row, Table
from benchmarks.harness.workers import on_ranks

MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux has a file system in memory
SYNC = (
    Column("method"), Column("save s", ".3f"), Column("save ÷", ".2f", drawn=True),
    Column("load s", ".3f"), Column("load ÷", ".2f", drawn=True), Column("cold s", ".3f"),
    Column("cold ÷", ".2f"), Column("GB fetched", ".3f"), Column("GB on disk", ".3f"),
    Column("MiB to save", ".0f"), Column("MiB to load", ".0f"),
)  # fmt: skip
ASYNC = (
    Column("method"), Column("stall ms", ".0f"), Column("÷ its sync", ".1%"),
    Column("durable s", ".3f"), Column("steps ×", ".2f"), Column("lost ms", ".0f"),
    Column("MiB to save", ".0f"),
)  # fmt: skip
TARGETS = (
    Column("target"), Column("ranks"), Column("on"), Column("wanted"), Column("measured"),
    Column(""),
)  # fmt: skip
NOTES = """
Medians over rounds; the clock of a round stops with its slowest rank. Every load was checked: each
rank compared every bit of parameters and moments with what was there when saving began.
save s      until all files are synced: DCP syncs its files by default, torch.save does not, so
            full does it after it
load s      into a model without values and an optimizer without state; files in the page cache
cold s      files on the disk only; GB fetched: from there, as the kernel counts, all ranks
÷           DCP's median ÷ this one, of the same kind: how many times faster
full        full state dict on rank 0, torch.save; back by torch.load(mmap) and broadcast
stall ms    until save_async returns; ÷ its sync: of the save above it, of the same engine. With
            ours_step_async the next step waits for what is not copied yet: that is in steps ×
durable s   of a save with two training steps meanwhile, from its begin
steps ×     two steps right after the stall ÷ two steps with nothing under way
lost ms     stall + what those steps took longer
MiB to …    anonymous and shared memory beyond the state, the most of any rank, proportional set
            size, every 2 ms from outside, in processes of their own
checks      ours: CRC-32 of every byte, computed by save, compared by load. dcp: none; full: none
""".strip().splitlines()
MOST_STALL = 0.05  # of the save
FASTER = 3  # times, than DCP


@dataclass(frozen=True)
class Config:
    """What to measure."""

    world: tuple[int, ...] = setting((2,), "numbers of ranks")
    gigabytes: float = setting(1.1, "of parameters and both moments")
    rounds: int = setting(5, "interleaved rounds", least=1)
    folder: tuple[str, ...] = setting((), "one on each file system; a temporary one, and memory")
    part: tuple[str, ...] = setting(("time", "memory"), "what is measured", ("time", "memory"))


def run(config: Config, log: Log) -> Iterator[Report]:
    """Save and load a training state: time, memory and bytes, beside DCP and torch.save."""
    size = Size(config.gigabytes)
    params = sum(param.numel() for param in size.new_model().parameters())
    state = f"{BYTES * params / 1e9:.2f} GB of parameters and two moments, float32"
    report = Report(this_machine(), notes=tuple(NOTES))
    tables: list[Table] = []
    verdicts: list[tuple[Cell, ...]] = []
    for world in config.world:
        with _places(config) as places:
            log(f"{world} ranks, {state}, {config.rounds} rounds on {', '.join(places)}")
            ranks: list[Measured] = on_ranks(world, measure, Task(size, places, config.rounds))
            rows = {name: row_of([rank.laps[name] for rank in ranks]) for name in ranks[0].laps}
            first = next(iter(places))
            for name in METHODS if "memory" in config.part else ():
                log(f"{world} ranks, memory: {name}")
                held = extra_memory(name, size, world, Path(places[first]))
                rows[f"{first} {name}"] |= {f"MiB to {p}": n / MIB for p, n in held.items()}
        for kind in places:
            of_kind = {n.split()[1]: row for n, row in rows.items() if n.split()[0] == kind}
            compare(of_kind)
            tables += tables_of(f"{world} ranks, {kind}", of_kind)
            verdicts += [
                (name, world, kind, *rest) for name, *rest in judged(of_kind, ranks[0].bucket / MIB)
            ]
        unit = f"largest unit {ranks[0].bucket / MIB:.1f} MiB"
        settings = f"{state}; {unit}; {config.rounds} rounds"
        targets = Table("targets", TARGETS, tuple(verdicts))
        report = replace(report, settings=(settings,), tables=(*tables, targets))
        yield report


def default_folders(gigabytes: float) -> tuple[str, ...]:
    """Where temporary files go; and memory, where that is another file system with room."""
    disk = Path(tempfile.gettempdir())
    if not MEMORY.is_dir() or kind_of(disk) == kind_of(MEMORY):
        return (str(disk),)
    has_room = shutil.disk_usage(MEMORY).free > 4e9 * gigabytes
    return (str(disk), str(MEMORY)) if has_room else (str(disk),)


@contextmanager
def _places(config: Config) -> Iterator[dict[str, str]]:
    """Kind of file system → a new folder on it, which goes afterwards."""
    places = {}
    try:
        for folder in config.folder or default_folders(config.gigabytes):
            places[kind_of(Path(folder))] = tempfile.mkdtemp(dir=folder)
        yield places
    finally:
        for place in places.values():
            shutil.rmtree(place, ignore_errors=True)


# ---- from laps to tables -------------------------------------------------------------------


def row_of(ranks: Sequence[Sequence[Lap]]) -> Row:
    """From every rank's laps with one method on one file system."""
    rounds = list(zip(*ranks, strict=True))

    def seconds(name: str) -> list[float]:
        return [max(getattr(lap, name) for lap in laps) for laps in rounds]

    every = [lap for laps in rounds for lap in laps]
    row: Row = {
        "save s": median(seconds("save")),
        "load s": median(seconds("load")),
        "GB on disk": max(lap.nbytes for lap in every) / 1e9,
    }
    if every[0].cold is not None:
        fetched = median(sum(lap.from_disk for lap in laps) for laps in rounds)
        row |= {"cold s": median(seconds("cold")), "GB fetched": fetched / 1e9}
    if every[0].alone:
        stall, alone, meanwhile = seconds("stall"), seconds("alone"), seconds("meanwhile")
        lost = [s + m - a for s, m, a in zip(stall, meanwhile, alone, strict=True)]
        row |= {"stall ms": 1e3 * median(stall), "durable s": row["save s"]}
        row |= {"steps ×": median(meanwhile) / median(alone), "lost ms": 1e3 * median(lost)}
    return row


def compare(rows: Mapping[str, Row]) -> None:
    """Add what each is beside DCP, and beside the synchronous save of the same engine."""
    for name, row in rows.items():
        for what in ("save", "load", "cold"):
            mine, rival = row.get(f"{what} s"), rows["dcp"].get(f"{what} s")
            if isinstance(mine, float) and isinstance(rival, float):
                row[f"{what} ÷"] = rival / mine
        stall, save = row.get("stall ms"), rows[synchronous(name)]["save s"]
        if isinstance(stall, float) and isinstance(save, float):
            row["÷ its sync"] = stall / 1e3 / save


def tables_of(title: str, rows: Mapping[str, Row]) -> list[Table]:
    """The synchronous methods, and those that return early if there are any."""
    sync = {name: row for name, row in rows.items() if not is_async(name)}
    early = {name: row for name, row in rows.items() if is_async(name)}
    return [Table.of(title, SYNC, sync), *([Table.of("", ASYNC, early)] if early else [])]


def judged(rows: Mapping[str, Row], bucket: float) -> Iterator[tuple[str, str, str, str]]:
    """Each target: its name, what was wanted and measured, and the verdict. ``bucket``: MiB."""
    faster = [(f"{what}: times faster than DCP", f"{what} ÷") for what in ("save", "load", "cold")]
    held = [
        (f"{what}: memory beyond the state, a rank", f"MiB to {what}") for what in ("save", "load")
    ]
    for name, column in faster:
        if isinstance(times := rows["ours"].get(column), float):
            yield name, f"≥ {FASTER}", f"{times:.2f}", _verdict(reached=times >= FASTER)
    for name, row in rows.items():
        if name.startswith("ours") and isinstance(share := row.get("÷ its sync"), float):
            verdict = _verdict(reached=share <= MOST_STALL)
            yield f"stall of {name} ÷ save", f"≤ {MOST_STALL:.0%}", f"{share:.1%}", verdict
    for name, column in held:
        if isinstance(mib := rows["ours"].get(column), float):
            yield name, f"≤ {bucket:.0f} MiB", f"{mib:.0f} MiB", _verdict(reached=mib <= bucket)


def _verdict(*, reached: bool) -> str:
    return "reached" if reached else "MISSED"
