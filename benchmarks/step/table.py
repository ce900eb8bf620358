"""A report as plain text: pure functions from a report to lines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from benchmarks.harness.plots import Bar
from benchmarks.harness.tables import MIB, aligned
from benchmarks.step.engines import PLAIN
from benchmarks.step.host import Host, Update
from benchmarks.step.memory import Memory
from benchmarks.step.models import TASKS
from benchmarks.step.report import Report, Row, Times, Traffic

HOSTS = ("engine", "params a unit", "median", "min", "plain")
UPDATES = ("engine", "variant", "median", "min")
STRATEGIES = ("no_shard", "zero1", "shard_grad_op", "full_shard")
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
    text = [str(report.machine), f"optimizer: {_optimizer(report.optimizer)}"]
    for (model, world), rows in groupby(report.rows, key=lambda row: (row.model, row.world)):
        text += ["", f"{model}, {world} ranks: {TASKS[model].summary}", *_steps(list(rows))]
    if report.rows:
        text += NOTES
    if report.hosts:
        text += ["", "Host time: µs per unit and step beyond a plain model, fake world 8"]
        text += aligned([HOSTS, *map(_host, report.hosts)])
    if report.updates:
        text += ["", "AdamW on 320 parameters of 16 × 16, fake world 8: ms per step()"]
        text += aligned([UPDATES, *map(_update, report.updates)])
    return text


def bars(report: Report) -> dict[str, list[Bar]]:
    """Times ÷ plain, the fastest engine first; one panel for each model and world."""
    panels: dict[str, list[Bar]] = {}
    timed = [(row, row.times) for row in report.rows if row.times is not None]
    for row, times in sorted(timed, key=lambda pair: pair[1].ratio):
        bar = Bar(row.engine, times.ratio, _colour(row.engine), times.low, times.high)
        panels.setdefault(f"{row.model}, {row.world} ranks", []).append(bar)
    return panels


def _colour(engine: str) -> str:
    if engine == PLAIN:
        return "#222222"
    return "#4477aa" if engine.removesuffix("_memory") in STRATEGIES else "#bbbbbb"


def _optimizer(name: str) -> str:
    kind, _, fused = name.partition("_")
    if fused:
        but = "; foreach for FSDP2, which has no fused one" if kind == "sgd" else ""
        return f"{kind}, torch's fused kernel, for every engine; by sw.optim for ours{but}"
    return f"torch.optim {kind}, its loop on CPU, for every engine"


def _steps(rows: Sequence[Row]) -> list[str]:
    cells = [
        [
            row.engine + "*" * row.apart,
            *(*_times(row.times), *_traffic(row.traffic), *_memory(row.memory)),
        ]
        for row in rows
        if not row.absent
    ]
    absent = [f"{row.engine}: absent, {row.absent}" for row in rows if row.absent]
    return [*aligned([HEAD, *cells]), *absent]


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
    sent, least, copied = (
        f"{nbytes / 1e6:.2f}" for nbytes in (traffic.sent, traffic.least, traffic.copied)
    )
    return [sent, least, share, copied]


def _memory(memory: Memory | None) -> list[str]:
    if memory is None:
        return ["–"] * 2
    return [f"{memory.peak / MIB:.0f}", f"{(memory.peak - memory.start) / MIB:.0f}"]


def _host(host: Host) -> list[str]:
    times = (f"{each:.0f}" for each in (host.median, host.least, host.plain))
    return [host.engine, str(host.params), *times]


def _update(update: Update) -> list[str]:
    return [update.engine, update.variant, f"{update.median:.3f}", f"{update.least:.3f}"]
