"""``shardwise bench``: a model of the user's under each strategy, beside DDP and FSDP2, here."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch

from shardwise.cli.planned import planned
from shardwise.cli.tables import table
from shardwise.comm.machine.environment import read_launch
from shardwise.config.strategies import STRATEGIES
from shardwise.integrations.side_by_side import (
    Measured,
    Subject,
    measure,
    peak_memory,
    process_group,
)
from shardwise.launch.error_files import told_by_launcher
from shardwise.launch.launcher import exit_with_launcher, start
from shardwise.plan.forecast.candidate import Candidate
from shardwise.plan.forecast.memory import FIRST_STEP
from shardwise.plan.forecast.planner import Planner
from shardwise.plan.forecast.question import Question
from shardwise.train.foresight import machine_here
from shardwise.train.memory_estimate import memory_of
from shardwise.train.records import plural

MEMORY_STEPS = 3


@dataclass(frozen=True)
class Bench:
    """A measurement that is asked for."""

    model: str
    nproc: int
    rounds: int
    rows: int
    seq: int | None
    engines: tuple[str, ...]
    machines: Path | None = None  # with the entry of this one

    @property
    def arguments(self) -> list[str]:
        """The command line that asks for it again."""
        words = [self.model, f"--rounds={self.rounds}", f"--rows={self.rows}"]
        words += [f"--seq={self.seq}"] * (self.seq is not None)
        words += [f"--machines={self.machines}"] * (self.machines is not None)
        return [*words, *(f"--engine={name}" for name in self.engines)]

    def question(self, ranks: int) -> Question:
        """The question about this machine; without its entry, about its memory alone."""
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        here = machine_here(device, memory_of(device), self.machines, ranks).machine
        return replace(planned(self.model, here, ranks, length=self.seq).question, rows=None)


@dataclass(frozen=True)
class Row:
    """One engine: measured, and planned where it is ours; bytes over all ranks."""

    engine: str
    milliseconds: float
    tokens_per_second: float
    flops_per_second: float
    sent: int | None
    peak: int | None = None
    planned_peak: int | None = None
    planned_milliseconds: float | None = None
    mfu: float | None = None
    counted: str = "tokens"


def run_bench(bench: Bench, memory: str | None, result: Path | None, as_json: bool) -> list[Row]:
    """Measure and print; or, as one of the ranks, measure and write to ``result``."""
    if read_launch(os.environ) is not None:
        exit_with_launcher(os.environ)
        with told_by_launcher():
            _as_a_rank(bench, memory, result, as_json)
        return []
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "result.json"

        def ranks(*more: str) -> Any:
            words = ["bench", *bench.arguments, f"--result={written}", *more]
            start([sys.executable, "-m", "shardwise.cli", *words], bench.nproc)
            return json.loads(written.read_text("ascii"))

        rows = [Row(**row) for row in ranks()]
        for number, row in enumerate(rows):
            _say(f"memory of {row.engine}, in processes of its own")
            rows[number] = replace(row, peak=ranks(f"--memory={row.engine}"))
    _print(rows, bench, as_json)
    return rows


def _as_a_rank(bench: Bench, memory: str | None, result: Path | None, as_json: bool) -> None:
    with process_group() as rank:
        question = bench.question(int(os.environ["WORLD_SIZE"]))
        subject = Subject(
            question.model, *question.inputs(bench.rows), question.loss, question.arguments
        )
        say = _say if rank == 0 else lambda _: None
        if memory is not None:
            answer: Any = peak_memory(subject, memory, MEMORY_STEPS)
        else:
            answer = _rows(question, bench, measure(subject, bench.engines, bench.rounds, say))
    if rank == 0 and result is not None:
        result.write_text(json.dumps(answer), "ascii")
    elif rank == 0:
        _print([Row(**row) for row in answer], bench, as_json)


def _rows(question: Question, bench: Bench, measured: Sequence[Measured]) -> list[dict[str, Any]]:
    planners = {shared: Planner(replace(question, shared=shared)) for shared in (False, True)}
    time = planners[question.shared].forecast(Candidate("no_shard", bench.rows)).time
    rows = []
    for one in measured:
        steps = 1e3 / one.milliseconds
        rates = time.work.tokens * question.ranks * steps, time.work.flops * steps
        mfu = time.mfu() * time.seconds * steps if bench.machines else None  # as a plan counts it
        row = Row(one.engine, one.milliseconds, *rates, one.sent, mfu=mfu)
        row = replace(row, counted=time.work.counted)
        if one.engine in STRATEGIES:
            row = _beside_the_plan(row, bench, planners[one.shared])
        rows.append(asdict(row))
    return rows


def _beside_the_plan(row: Row, bench: Bench, planner: Planner) -> Row:
    """The row with what the plan says, on a CPU of processes, as they are measured.

    So without what a first step loads; and nothing is recomputed, of which they could keep a part.
    """
    question, forecast = planner.question, planner.forecast(Candidate(row.engine, bench.rows))
    milliseconds = 1e3 * forecast.time.seconds if bench.machines else None
    memory, on_cpu = forecast.memory, question.machine.accelerator.device == "cpu"
    peak = memory.process(kept=0) - FIRST_STEP if on_cpu else memory.peak
    return replace(row, planned_peak=question.ranks * peak, planned_milliseconds=milliseconds)


def _print(rows: Sequence[Row], bench: Bench, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows]))
        return
    head = [
        "engine",
        "ms",
        "planned",
        f"{rows[0].counted}/s",
        "TFLOP/s",
        "MFU",
        "MB sent",
        "MB peak",
        "planned",
    ]
    rows_of_a_rank, rounds = plural(bench.rows, "row"), plural(bench.rounds, "round")
    click.echo(f"{bench.model}, {rows_of_a_rank} on each rank, medians of {rounds}")
    click.echo("\n".join(["", *table([_cells(row) for row in rows], head), "", *_LEGEND]))


_LEGEND = (
    "ms          of a step; engines take turns, the slowest rank counts",
    "TFLOP/s     of a rank; MB sent: in a step, by a rank",
    "MFU         three forward passes ÷ what --machines promises, as in a plan",
    "peak        of all ranks, beyond Python and torch; each engine by itself",
    "planned     the same, from the plan; of ms with --machines, which --calibrate writes",
)


def _cells(row: Row) -> list[str]:
    def megabytes(nbytes: int | None) -> str:
        return "-" if nbytes is None else f"{nbytes / 1e6:,.1f}"

    mfu = "-" if row.mfu is None else f"{row.mfu:.1%}"
    rates = f"{row.tokens_per_second:,.0f}", f"{row.flops_per_second / 1e12:,.3f}", mfu
    sizes = map(megabytes, (row.sent, row.peak, row.planned_peak))
    plan = row.planned_milliseconds
    times = f"{row.milliseconds:,.1f}", "-" if plan is None else f"{plan:,.1f}"
    return [row.engine, *times, *rates, *sizes]


def _say(text: str) -> None:
    click.echo(text, err=True)
