"""Which processes run, one after the other, and the tables that come of what they measured."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.checkpoint.measure import Lap, Measured, extra_memory, kind_of, measure
from benchmarks.checkpoint.methods import METHODS, is_async, synchronous
from benchmarks.checkpoint.trained import BYTES, Size
from benchmarks.harness.command import Log, setting
from benchmarks.harness.machine import this_machine
from benchmarks.harness.report import MIB, Column, Report, Row, Table, verdict
from benchmarks.harness.workers import on_ranks

SYNC = (
    Column("method"), Column("save s", ".3f"), Column("save ÷", ".3f", drawn=True),
    Column("÷ plain", ".3f", target=1.15),
    Column("load s", ".3f"), Column("load ÷", ".3f", drawn=True, target=1 / 3),
    Column("cold s", ".3f"), Column("cold ÷", ".3f", target=1 / 3), Column("GB fetched", ".3f"),
    Column("GB on disk", ".3f"), Column("MiB to save", ".0f"), Column("MiB to load", ".0f"),
)  # fmt: skip
ASYNC = (
    Column("method"), Column("stall ms", ".0f"), Column("÷ its sync", ".3f", target=0.05),
    Column("durable s", ".3f"), Column("steps ×", ".2f"), Column("lost ms", ".0f"),
    Column("lost ÷", ".3f", target=0.5), Column("MiB to save", ".0f"),
)  # fmt: skip
QUOTIENTS = {
    "save ÷": ("save s", "dcp"), "÷ plain": ("save s", "plain"), "load ÷": ("load s", "dcp"),
    "cold ÷": ("cold s", "dcp"), "lost ÷": ("lost ms", "dcp_async"),
}  # fmt: skip
"""A column → the column that it compares, and with which method."""
NOTES = """
Medians over rounds; the clock of a round stops with its slowest rank. Every load was checked: each
rank compared every bit of parameters and moments with what was there when saving began.
save s      until all files are synced: DCP syncs its files by default, torch.save does not, so
            full does it after it
load s      into a model without values and an optimizer without state; files in the page cache
cold s      files on the disk only; GB fetched: from there, as the kernel counts, all ranks
÷           this median ÷ DCP's of the same kind; ÷ plain: save s ÷ plain's
full        full state dict on rank 0, torch.save; back by torch.load(mmap) and broadcast
plain       pwrite of the same bytes by the same ranks, each to a file of its own, and fsync
stall ms    until save_async returns; ÷ its sync: of the save above it, of the same engine. With
            ours_async the next step waits for what is not copied yet: that is in steps ×
durable s   of a save with two training steps meanwhile, from its begin
steps ×     two steps right after the stall ÷ two steps with nothing under way
lost ms     stall + what those steps took longer; lost ÷: this ÷ DCP's
MiB to …    anonymous and shared memory beyond the state, the most of any rank, proportional set
            size, every 2 ms from outside, in processes of their own
checks      ours: CRC-32 of every byte, computed by save, compared by load. dcp: none; full: none
""".strip().splitlines()


@dataclass(frozen=True)
class Config:
    """What to measure."""

    world: tuple[int, ...] = setting((2,), "numbers of ranks")
    gigabytes: float = setting(1.1, "of parameters and both moments")
    rounds: int = setting(5, "interleaved rounds", least=1)
    folder: str = setting(tempfile.gettempdir(), "on which file system; /dev/shm is memory")
    part: tuple[str, ...] = setting(("time", "memory"), "what is measured", ("time", "memory"))


def run(config: Config, log: Log) -> Iterator[Report]:
    """Save and load a training state: time, memory and bytes, beside DCP and torch.save."""
    size, kind = Size(config.gigabytes), kind_of(Path(config.folder))
    params = sum(param.numel() for param in size.new_model().parameters())
    state = f"{BYTES * params / 1e9:.2f} GB of parameters and two moments, float32"
    report = Report(this_machine(), (f"{state}; {config.rounds} rounds",), notes=tuple(NOTES))
    for world in config.world:
        with tempfile.TemporaryDirectory(dir=config.folder) as place:
            log(f"{world} ranks, {state}, {config.rounds} rounds on {kind}")
            ranks: list[Measured] = on_ranks(world, measure, size, place, config.rounds)
            rows = {name: row_of([rank.laps[name] for rank in ranks]) for name in METHODS}
            for name in METHODS if "memory" in config.part else ():
                log(f"{world} ranks, memory: {name}")
                held = extra_memory(name, size, world, Path(place))
                rows[name] |= {f"MiB to {phase}": n / MIB for phase, n in held.items()}
        tables = tables_of(f"{world} ranks, {kind}", rows, ranks[0].bucket / MIB)
        report = replace(report, tables=(*report.tables, *tables))
        yield report


# ---- from laps to tables -------------------------------------------------------------------


def row_of(ranks: Sequence[Sequence[Lap]]) -> Row:
    """The row of one method, from every rank's laps."""
    rounds = list(zip(*ranks, strict=True))

    def seconds(name: str) -> list[float]:
        return [max(getattr(lap, name) for lap in laps) for laps in rounds]

    row: Row = {
        "save s": median(seconds("save")),
        "GB on disk": max(lap.nbytes for laps in rounds for lap in laps) / 1e9,
    }
    if rounds[0][0].load is not None:
        row["load s"] = median(seconds("load"))
    if rounds[0][0].cold is not None:
        fetched = median(sum(lap.from_disk for lap in laps) for laps in rounds)
        row |= {"cold s": median(seconds("cold")), "GB fetched": fetched / 1e9}
    if rounds[0][0].alone:
        stall, alone, meanwhile = seconds("stall"), seconds("alone"), seconds("meanwhile")
        lost = [s + m - a for s, m, a in zip(stall, meanwhile, alone, strict=True)]
        row |= {"stall ms": 1e3 * median(stall), "durable s": row["save s"]}
        row |= {"steps ×": median(meanwhile) / median(alone), "lost ms": 1e3 * median(lost)}
    return row


def compare(rows: Mapping[str, Row]) -> None:
    """Add what each is beside DCP, and beside the synchronous save of the same engine."""
    for name, row in rows.items():
        for quotient, (column, rival) in QUOTIENTS.items():
            mine, other = row.get(column), rows.get(rival, {}).get(column)
            if isinstance(mine, float) and isinstance(other, float):
                row[quotient] = mine / other
        stall, save = row.get("stall ms"), rows[synchronous(name)]["save s"]
        if isinstance(stall, float) and isinstance(save, float):
            row["÷ its sync"] = stall / 1e3 / save


def tables_of(title: str, rows: Mapping[str, Row], bucket: float) -> Iterator[Table]:
    """The synchronous methods, and those that return early, each with what ours missed.

    ``bucket``: MiB of the largest unit, the most that ours should hold beyond the state.
    """
    compare(rows)
    for early, columns in ((False, SYNC), (True, ASYNC)):
        shown = {name: row for name, row in rows.items() if is_async(name) is early}
        limits = columns if early else [*columns[:-2], *_limited(columns[-2:], bucket)]
        measured = [c for c in limits if any(c.name in row for row in shown.values())]
        verdicts = [verdict(n, row, measured) for n, row in shown.items() if n.startswith("ours")]
        yield Table.of("" if early else title, limits, shown, verdicts)


def _limited(columns: Sequence[Column], target: float) -> list[Column]:
    return [replace(column, target=target) for column in columns]
