"""A report as plain text: pure functions from a report to lines."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.gpu.engines import OPTIMIZERS
from benchmarks.gpu.measure import Memory
from benchmarks.gpu.models import summary
from benchmarks.gpu.report import Case, Report, Row, Times, verdicts
from benchmarks.harness.tables import MIB, aligned, cell

STEP = (
    "engine", "÷ rival", "quartiles", "ms", "min ms", "device", "host",
    "MiB rest", "MiB peak", "reserved", "÷ rival",
)  # fmt: skip
LANES = ("engine", "collectives ms", "hidden", "exposed ms", "idle ms", "MB received")
COPIED = ("engine", "copies of", "kernels", "ms", "calls", "MB written")
NOTES = """
÷ rival      full_shard ÷ fsdp2 and shard_grad_op ÷ fsdp2_keep: step by step in the same round, and
             peak by peak
ms           of a step, from an idle device to an idle device; device: by its own clock; host: until
             the host has asked for everything
MiB          rest: between steps; peak: the most in use; reserved: the most taken from the device
hidden       of the collectives' time, the part beside a kernel that computes
exposed      the collectives' time beside no other kernel; idle: nothing runs at all
copies of    own slice: no more than one rank's part of the largest unit; whole: more than that;
             not named: kernels that look like copies and belong to no operation that we know
plain        whole, bf16, no communication and no optimizer: for scale only
*            in a process of its own, because all engines together do not fit the device
""".splitlines()


def lines(report: Report) -> list[str]:
    """The whole report."""
    allocator = report.allocator or "torch's default"
    text = [str(report.machine), f"{report.device}; allocator: {allocator}", _rules(report)]
    for case in report.cases:
        text += ["", *_case(case)]
    return text + NOTES if report.cases else text


def _rules(report: Report) -> str:
    flat = report.optimizer == OPTIMIZERS[1]
    optimizer = "ours: sw.optim.AdamW, others: " if flat else ""
    return (
        f"bf16 compute on fp32 shards, {optimizer}torch.optim.AdamW(fused=True), "
        f"gradients travel: {report.wire}"
    )


def _case(case: Case) -> list[str]:
    link = case.link
    speed = (
        f"{link.bandwidth / 1e9:.0f} GB/s and {link.latency * 1e6:.0f} µs assumed"
        if link.bandwidth
        else "collectives take no time"
    )
    text = [f"{case.model}, rank 0 of {case.world}, {speed}: {summary(case.shape)}"]
    text += aligned([STEP, *(_step(row, case) for row in case.rows if not row.error)])
    measured = [row for row in case.rows if row.alone is not None]
    if measured:
        text += ["", *aligned([LANES, *map(_lane, measured)])]
        text += ["", *aligned([COPIED, *(cells for row in measured for cells in _copied(row))])]
    text += [f"{row.engine}: failed, {row.error}" for row in case.rows if row.error]
    return [*text, "", *_targets(case)]


def _targets(case: Case) -> Iterable[str]:
    for verdict in verdicts(case):
        missed = verdict.missed
        yield f"{verdict.engine}: {'; '.join(missed) if missed else 'all targets reached'}"


def _step(row: Row, case: Case) -> list[str]:
    times = row.times
    name = row.engine + "*" * (times is not None and times.apart)
    memory = _memory(row.alone.memory if row.alone is not None else None)
    ratio = next((v.memory for v in verdicts(case) if v.engine == row.engine), None)
    return [name, *(["–"] * 6 if times is None else _times(times)), *memory, cell(ratio, ".3f")]


def _times(times: Times) -> list[str]:
    return [
        cell(times.ratio, ".3f"),
        f"{times.low:.2f}–{times.high:.2f}" if times.low is not None else "–",
        *(cell(ms, ",.2f") for ms in (times.median, times.least, times.device, times.host)),
    ]


def _memory(memory: Memory | None) -> list[str]:
    if memory is None:
        return ["–"] * 3
    parts = (memory.rest, memory.peak, memory.reserved)
    return [cell(None if part is None else part / MIB, ",.1f") for part in parts]


def _lane(row: Row) -> list[str]:
    assert row.alone is not None
    overlap = row.alone.overlap
    return [
        row.engine,
        f"{overlap.collectives:.2f}",
        f"{overlap.share:.0%}" if overlap.collectives else "–",
        f"{overlap.exposed:.2f}",
        f"{overlap.idle:.2f}",
        f"{row.alone.received / 1e6:,.2f}",
    ]


def _copied(row: Row) -> Iterable[list[str]]:
    assert row.alone is not None
    for count in row.alone.copies:
        numbers = (f"{count.kernels:.0f}", f"{count.milliseconds:.3f}", f"{count.calls:.0f}")
        yield [row.engine, count.side, *numbers, f"{count.nbytes / 1e6:,.2f}"]
