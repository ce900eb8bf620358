"""Every case with both engines, each in two processes of its own; and the table."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.command import Log, setting
from benchmarks.harness.machine import Machine, this_machine
from benchmarks.harness.report import Cell, Column, Report, Table, read
from benchmarks.harness.workers import Worker, Workers
from benchmarks.scorecard import files, flow, misuse, parameters
from benchmarks.scorecard.case import (
    HANG,
    OUTCOMES,
    RIGHT,
    UNNAMED,
    WRONG,
    Case,
    Result,
    classified,
    compared,
    of_both,
)
from benchmarks.scorecard.engines import FSDP2, Engine, Plain, Shardwise

CASES = (*flow.CASES, *parameters.CASES, *files.CASES, *misuse.CASES)
ENGINES = ("FSDP2", "shardwise")
RESULTS, OTHERS = Path(__file__).parents[1] / "results", "step-2-ranks-other-models"
PRELOADED = ["benchmarks.scorecard.run", "torch.distributed.fsdp", "torch._dynamo"]


@dataclass(frozen=True)
class Config:
    """The cases that run."""

    only: str = setting("", "cases whose pain or title contains this")
    limit: int = setting(30, "seconds after which a case hangs", least=1)


@dataclass(frozen=True)
class Cost:
    """A pain that is a cost: numbers of a recorded benchmark, and the row that bounds them."""

    pain: str
    title: str
    file: str
    column: str
    table: int
    rows: tuple[tuple[str, ...], ...]  # as they begin: the bound, FSDP2, shardwise
    times: float = 1.0  # the bound's row

    def read(self) -> tuple[Cell, ...]:
        """A row of the report."""
        table = read(RESULTS / f"{self.file}.json").tables[self.table]
        at = [column.name for column in table.columns].index(self.column)
        most, fsdp2, shardwise = (
            next(float(str(row[at])) for row in table.rows if row[: len(start)] == start)
            for start in self.rows
        )
        verdicts = (
            WITHIN if number <= most * self.times else ABOVE for number in (fsdp2, shardwise)
        )
        return (self.pain, self.title, most * self.times, fsdp2, shardwise, *verdicts)


WITHIN, ABOVE = "within", "above"
ONE = (("ddp",), ("fsdp2",), ("full_shard",))
COSTS = (
    Cost("7", "MB sent, frozen model with adapters; ZeRO-2's", OTHERS, "MB sent", 2,
         (("shard_grad_op",), ("fsdp2",), ("full_shard",))),
    Cost("10", "ms, AdamW of 320 small parameters; plain training's", "host", "median", 1,
         (("plain", "fused"), ("fsdp2", "fused"), ("full_shard", "flat"))),
    Cost("20", "ms, step of many small parameters; twice DDP's", OTHERS, "ms", 0, ONE, 2.0),
    Cost("21", "MiB at the peak; plain training's", "memory", "MiB peak", 0,
         (("plain",), ("fsdp2",), ("full_shard",))),
    Cost("23", "MB copied in a step; FSDP1's", "step-2-ranks", "MB copied", 0,
         (("fsdp1",), ("fsdp2",), ("full_shard",))),
)  # fmt: skip

COST_COLUMNS = (
    Column("pain"), Column("what, and the most it should be"), Column("most", ".2f"),
    *(Column(engine, ".2f") for engine in ENGINES), *map(Column, ENGINES),
)  # fmt: skip
LINE = 160  # characters of an error that are shown


def run(config: Config, log: Log) -> Iterator[Report]:
    """What users of FSDP suffer from, and misuse: with FSDP2 and with shardwise."""
    mp.get_context("forkserver").set_forkserver_preload(PRELOADED)
    machine, done = this_machine(), list[tuple[Case, Result, Result]]()
    for number, case in enumerate(CASES):
        if config.only in f"{case.pain} {case.title}":
            log(f"{case.pain}: {case.title}")
            fsdp2, shardwise = (_ended(number, engine, config.limit) for engine in ENGINES)
            done.append((case, fsdp2, shardwise))
    yield report_of(machine, done)


def _ended(number: int, engine: str, limit: int) -> Result:
    """How the ranks of one case ended."""
    try:
        with Workers(2, work, number, engine, timeout=limit, start="forkserver") as workers:
            return of_both([Result(*result) for result in workers.receive()])
    except RuntimeError as error:
        return Result(HANG, str(error).splitlines()[0])


def work(worker: Worker, number: int, name: str) -> None:
    """One rank of one case: send its result."""
    case = CASES[number]
    truth = case.run(Plain(worker.folder))
    worker.join_group()
    engine: Engine
    if name == "FSDP2":
        engine = FSDP2(worker.rank, worker.folder, case.timeout)
    else:
        engine = Shardwise(worker.rank, worker.folder, case.timeout)
    try:
        result = compared(case.run(engine), truth, case.tolerance)
    except Exception as error:  # noqa: BLE001 - it is what is judged
        result = classified(error, case.names)
    worker.send(tuple(result))


# ---- the report ----------------------------------------------------------------------------


def report_of(machine: Machine, done: Sequence[tuple[Case, Result, Result]]) -> Report:
    """A row for each case, and a line for each result that is not clear."""
    rows: list[tuple[Cell, ...]] = [
        (case.pain, case.title, *(r.outcome for r in results)) for case, *results in done
    ]
    lines = [
        f"{case.pain}: {case.title}: {engine}: {result.outcome}: {result.detail}"[:LINE]
        for case, *results in done
        for engine, result in zip(ENGINES, results, strict=True)
        if result.outcome != RIGHT
    ]
    counts: list[tuple[Cell, ...]] = [
        (outcome, *(sum(row[2 + at] == outcome for row in rows) for at in range(2)))
        for outcome in OUTCOMES
    ]
    costs = tuple(cost.read() for cost in COSTS)
    return Report(
        machine,
        (),
        (
            Table("cases", tuple(map(Column, ("outcome", *ENGINES))), tuple(counts)),
            Table("", tuple(map(Column, ("pain", "case", *ENGINES))), tuple(rows)),
            Table("costs, as recorded by the other benchmarks over messages", COST_COLUMNS, costs),
        ),
        tuple(lines),
        failures=sum(row[3] in (WRONG, HANG, UNNAMED) for row in rows),
    )
