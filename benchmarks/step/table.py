"""A report as plain text: pure functions from a report to lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from benchmarks.step.memory import Memory
from benchmarks.step.models import TASKS
from benchmarks.step.results import Report, Row, Times, Traffic

__all__ = ["lines"]

MIB = 2**20
HEAD = (
    "engine", "× plain", "quartiles", "min ×", "ms", "min ms", "compute", "update",
    "MB sent", "least", "sent ÷", "MB copied", "MiB peak", "− start",
)  # fmt: skip
NOTES = """
× plain    median over rounds of the step ÷ the plain step (no communication) of that round; a step
           lasts until its slowest rank is done
ms         medians; compute = forward and backward, update = optimizer.step() and zero_grad()
MB sent    10⁶ bytes per rank and step, as the kernel counts them; least: what must be sent
sent ÷     below 1 where a unit that stays gathered between its two uses is not sent twice
MB copied  beyond the plain step's own copies, without those inside the backend's threads
MiB peak   proportional set size summed over ranks, each engine in processes of its own;
           − start: without Python, torch and the group
*          in processes of its own, beside a plain step of its own
""".splitlines()


def lines(report: Report) -> list[str]:
    """The whole report."""
    said = [str(report.machine)]
    said += [f"optimizer: {_optimizer(report.optimizer)}"]
    for (model, world), rows in groupby(report.rows, key=lambda row: (row.model, row.world)):
        said += ["", f"{model}, {world} ranks: {TASKS[model].says}", *_steps(list(rows))]
    if report.rows:
        said += NOTES
    if report.hosts:
        said += ["", "Host time: µs per unit and step beyond a plain model, fake world 8"]
        said += _hosts(report)
    if report.updates:
        said += ["", "AdamW on 320 parameters of 16 × 16, fake world 8: ms per step()"]
        said += _updates(report)
    return said


def _optimizer(name: str) -> str:
    kind, _, fused = name.partition("_")
    if fused:
        but = "; foreach for FSDP2, which has no fused one" if kind == "sgd" else ""
        return f"{kind}, torch's fused kernel, for every engine; by sw.optim for ours{but}"
    return f"torch.optim {kind}, its loop on CPU, for every engine"


def _steps(rows: Sequence[Row]) -> list[str]:
    there = [row for row in rows if not row.absent]
    cells = [
        (
            row.engine + "*" * row.apart,
            *_times(row.times),
            *_traffic(row.traffic),
            *_memory(row.memory),
        )
        for row in there
    ]
    gone = [f"{row.engine}: absent, {row.absent}" for row in rows if row.absent]
    return [*aligned([HEAD, *cells]), *gone]


def _times(times: Times | None) -> list[str]:
    if times is None:
        return ["–"] * 7
    return [
        f"{times.ratio:.3f}",
        f"{times.low:.2f}–{times.high:.2f}",
        f"{times.least_ratio:.3f}",
        *(f"{ms:.1f}" for ms in (times.median, times.least, times.compute, times.update)),
    ]


def _traffic(traffic: Traffic | None) -> list[str]:
    if traffic is None:
        return ["–"] * 4
    share = f"{traffic.sent / traffic.least:.3f}" if traffic.least else "–"
    return [
        f"{traffic.sent / 1e6:.2f}",
        f"{traffic.least / 1e6:.2f}",
        share,
        f"{traffic.copied / 1e6:.2f}",
    ]


def _memory(memory: Memory | None) -> list[str]:
    if memory is None:
        return ["–"] * 2
    return [f"{memory.peak / MIB:.0f}", f"{(memory.peak - memory.start) / MIB:.0f}"]


def _hosts(report: Report) -> list[str]:
    head = ("engine", "params a unit", "median", "min", "plain")
    cells = [
        (h.engine, str(h.params), f"{h.median:.0f}", f"{h.least:.0f}", f"{h.plain:.0f}")
        for h in report.hosts
    ]
    return aligned([head, *cells])


def _updates(report: Report) -> list[str]:
    head = ("engine", "variant", "median", "min")
    cells = [(u.engine, u.variant, f"{u.median:.3f}", f"{u.least:.3f}") for u in report.updates]
    return aligned([head, *cells])


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell: the first to the left, the others to the right."""
    table = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
