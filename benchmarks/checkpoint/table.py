"""A report as plain text: pure functions from a report to lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median

from benchmarks.checkpoint.memory import Extra
from benchmarks.checkpoint.methods import synchronous
from benchmarks.checkpoint.report import Report, Row
from benchmarks.harness.tables import MIB, aligned, cell

TIMES = (
    "method", "save s", "÷ dcp", "load s", "÷ dcp", "cold s", "÷ dcp", "GB fetched", "GB on disk",
)  # fmt: skip
ASYNC = ("method", "stall ms", "÷ its sync", "durable s", "steps ×", "lost ms", "of sync")
SENT = ("method", "collectives: save", "load", "MB sent: save", "load")
HELD = ("method", "MiB a rank: save", "load", "MiB all ranks: save", "load")
NOTES = """
Medians over rounds; the clock of a round stops with its slowest rank. Every load was checked: each
rank compared every bit of parameters and moments with what was there when saving began.
save s      until all files are synced: DCP syncs its files by default, torch.save does not, so
            full does it after it
load s      into a model without values and an optimizer without state; files in the page cache
cold s      files on the disk only; GB fetched: from there, as the kernel counts, all ranks
÷ dcp       DCP's median ÷ this one, of the same kind: how many times faster
full        full state dict on rank 0, torch.save; back by torch.load(mmap) and broadcast
stall ms    until save_async returns; ÷ its sync: of the save above it, of the same engine. With
            ours_step_async the next step waits for what is not copied yet: that is in steps ×
durable s   of a save with two training steps meanwhile, from its begin
steps ×     two steps right after the stall ÷ two steps with nothing under way
lost ms     stall + what those steps took longer; of sync: ÷ the synchronous save
MB sent     10⁶ bytes, the most of any rank; ours by its own counters (it went through shared
            memory), the others as the kernel counts their connections, so ours_async and dcp_async
            include two training steps and are left out
MiB         anonymous and shared memory beyond the state, proportional set size, every 2 ms from
            outside, in processes of their own
checks      ours: CRC-32 of every byte, computed by save, compared by load. dcp: none; full: none
""".strip().splitlines()


def lines(report: Report) -> list[str]:
    """The whole report."""
    state = f"{report.gigabytes:.2f} GB of parameters and two moments, float32"
    unit = f"largest unit {report.bucket / MIB:.1f} MiB"
    head = f"{state}; {unit}; {report.rounds} rounds; digest {report.digest[:12]}"
    text = [str(report.machine), head]
    for (world, target), group in groupby(report.rows, key=lambda row: (row.world, row.target)):
        rows = list(group)
        text += ["", f"{world} ranks, {target}"]
        text += aligned([TIMES, *_times([row for row in rows if not row.times.alone])])
        if any(row.times.alone for row in rows):
            text += ["", *aligned([ASYNC, *_async(rows)])]
    for world, group in groupby(report.rows, key=lambda row: row.world):
        every = list(group)
        rows = [row for row in every if row.target == every[0].target]
        text += ["", f"{world} ranks"]
        text += aligned([SENT, *(_sent(row) for row in rows if not row.times.alone)])
        if any(row.save_memory for row in rows):
            text += ["", *aligned([HELD, *(_held(row) for row in rows)])]
    return [*text, "", *NOTES, "", *verdicts(report)]


def _times(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    rival = _named(rows, "dcp")
    for row in rows:
        cells = [row.method]
        for name in ("save", "load", "cold"):
            mine, other = getattr(row.times, name), getattr(rival.times, name)
            cells += [f"{median(mine):.3f}", f"{_faster(mine, other):.2f}"] if mine else ["–", "–"]
        fetched = f"{row.from_disk / 1e9:.3f}" if row.times.cold else "–"
        yield (*cells, fetched, f"{row.nbytes / 1e9:.3f}")


def _faster(mine: Sequence[float], other: Sequence[float]) -> float:
    return median(other) / median(mine)


def _named(rows: Sequence[Row], method: str) -> Row:
    return next(row for row in rows if row.method == method)


def _async(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        if row.times.alone:
            sync = median(_named(rows, synchronous(row.method)).times.save)
            stall, lost = median(row.times.stall), _lost(row)
            yield (
                row.method,
                f"{1e3 * stall:.0f}",
                f"{stall / sync:.1%}",
                f"{median(row.times.save):.3f}",
                f"{median(row.times.meanwhile) / median(row.times.alone):.2f}",
                f"{1e3 * lost:.0f}",
                f"{lost / sync:.1%}",
            )


def _lost(row: Row) -> float:
    times = row.times
    triples = zip(times.stall, times.meanwhile, times.alone, strict=True)
    return median(stall + meanwhile - alone for stall, meanwhile, alone in triples)


def _sent(row: Row) -> tuple[str, ...]:
    collectives = str(row.save_collectives), str(row.load_collectives)
    return (row.method, *collectives, f"{row.save_sent / 1e6:.2f}", f"{row.load_sent / 1e6:.2f}")


def _held(row: Row) -> tuple[str, ...]:
    both = (row.save_memory, row.load_memory)
    ranks = (cell(extra.rank / MIB if extra else None, ".0f") for extra in both)
    totals = (cell(extra.total / MIB if extra else None, ".0f") for extra in both)
    return (row.method, *ranks, *totals)


# ---- targets -------------------------------------------------------------------------------


def verdicts(report: Report) -> list[str]:
    """Each target with what came of it."""
    cells = [("target", "ranks", "on", "wanted", "found", "")]
    for _, group in groupby(report.rows, key=lambda row: (row.world, row.target)):
        rows = list(group)
        for name, wanted, value, reached in _judged(rows, report.bucket):
            verdict = "reached" if reached else "MISSED"
            cells.append((name, str(rows[0].world), rows[0].target, wanted, value, verdict))
    return aligned(cells)


def _judged(rows: Sequence[Row], bucket: int) -> Iterator[tuple[str, str, str, bool]]:
    mine, rival = (_named(rows, method) for method in ("ours", "dcp"))
    for name in ("save", "load", "cold"):
        seconds = getattr(mine.times, name)
        if seconds:
            times = _faster(seconds, getattr(rival.times, name))
            yield f"{name}: times faster than DCP", "≥ 3", f"{times:.2f}", times >= 3
    for each in [row for row in rows if row.method.startswith("ours_")]:
        share = median(each.times.stall) / median(mine.times.save)
        yield f"stall of {each.method} ÷ save", "≤ 5%", f"{share:.1%}", share <= 0.05
    extras: dict[str, Extra | None] = {"save": mine.save_memory, "load": mine.load_memory}
    for name, extra in extras.items():
        if extra is not None:
            yield (
                f"{name}: memory beyond the state, a rank",
                f"≤ {bucket / MIB:.0f} MiB",
                f"{extra.rank / MIB:.0f} MiB",
                extra.rank <= bucket,
            )
