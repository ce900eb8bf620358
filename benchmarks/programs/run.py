"""Every program under every engine, in ranks that are replaced when a program ends badly.

A program that raises leaves its group in pieces, and one that hangs or crashes never reports. So
each engine has ranks that run one program after another, and new ranks from the program on that
did not end well.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import shardwise as sw
from benchmarks.harness.command import Log, setting
from benchmarks.harness.machine import this_machine
from benchmarks.harness.report import Column, Report, Table
from benchmarks.harness.workers import Worker, Workers
from benchmarks.programs import changes, loops, models, values  # noqa: F401 - they register
from benchmarks.programs.engines import ENGINES, Engine, Plain
from benchmarks.programs.program import PROGRAMS, Program, Values

VERDICTS = ("equal", "refused", "other numbers", "error", "crash", "hang")
"""``"refused"``: by an error of shardwise's own; ``"error"``: of anybody else."""

TIMEOUT = 240.0  # seconds for a program; compiling with inductor takes a minute on a busy machine
LONGEST = 300  # characters of an error that are kept

Verdict = tuple[str, str]
"""One of ``VERDICTS``, and what differs, or the error."""


@dataclass(frozen=True)
class Config:
    """What is run."""

    world: int = setting(2, "ranks", least=2)
    only: tuple[str, ...] = setting((), "these programs; all without", PROGRAMS)
    engines: tuple[str, ...] = setting(tuple(ENGINES), "under which", ENGINES)


def run(config: Config, log: Log) -> Iterator[Report]:
    """Run programs as users write them, and compare with plain PyTorch."""
    verdicts: dict[str, dict[str, Verdict]] = {}
    for engine in config.engines:
        verdicts[engine] = dict(_all_under(engine, config.world, config.only or [*PROGRAMS], log))
        yield report_of(verdicts, config.world)


def report_of(verdicts: Mapping[str, Mapping[str, Verdict]], world: int) -> Report:
    """A row for each program, and what went wrong. ``verdicts``: engine → program → verdict."""
    columns = (Column("program"), *map(Column, verdicts))
    names = next(iter(verdicts.values()))
    rows = tuple(
        (f"{name}: {PROGRAMS[name].about}", *(each[name][0] for each in verdicts.values()))
        for name in names
    )
    notes = []
    for engine, each in verdicts.items():
        found = [verdict for verdict, _ in each.values()]
        counts = (f"{found.count(verdict)} {verdict}" for verdict in VERDICTS if verdict in found)
        notes.append(f"{engine}: {len(found)} programs: {', '.join(counts)}")
    for engine, each in verdicts.items():
        bad = {name: pair for name, pair in each.items() if pair[0] != "equal"}
        notes += [f"{engine}, {name}: {what}: {detail}" for name, (what, detail) in bad.items()]
    title = f"{world} ranks, each program against plain PyTorch"
    return Report(this_machine(), (), (Table(title, columns, rows),), tuple(notes))


def _all_under(
    engine: str, world: int, names: Sequence[str], log: Log
) -> Iterator[tuple[str, Verdict]]:
    left = list(names)
    while left:
        with Workers(world, _rank, engine, left, timeout=TIMEOUT) as ranks:
            for name in list(left):
                verdict = _verdict_of(ranks)
                log(f"{engine}: {name}: {' '.join(verdict)}".strip())
                yield name, verdict
                left.remove(name)
                if verdict[0] != "equal":
                    ranks.stop()
                    break


def _verdict_of(ranks: Workers) -> Verdict:
    """The first that is not equal, of all ranks."""
    try:
        verdicts: list[Verdict] = ranks.receive()
    except RuntimeError as error:
        return "hang" if "sent nothing" in str(error) else "crash", _short(str(error))
    return next((each for each in verdicts if each[0] != "equal"), verdicts[0])


def _rank(worker: Worker, engine: str, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    with worker.group():
        under = ENGINES[engine]()
        for name in names:
            worker.send(_compared(PROGRAMS[name], under))


def _compared(program: Program, engine: Engine) -> Verdict:
    torch.manual_seed(0)
    expected = program.run(Plain())
    torch.manual_seed(0)
    try:
        values = program.run(engine)
    except Exception as error:  # noqa: BLE001 - whatever a user would see
        ours = isinstance(error, sw.ShardwiseError) and not isinstance(error, sw.RanksDisagree)
        return "refused" if ours else "error", _short(f"{type(error).__name__}: {error}")
    different = difference(expected, values, program.tolerance)
    return ("other numbers", different) if different else ("equal", "")


def difference(expected: Values, actual: Values, tolerance: float) -> str:
    """The first difference of a program from the plain one, ``""`` if there is none."""
    options: dict[str, Any] = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    try:
        torch.testing.assert_close(actual, expected, check_dtype=False, **options)
    except AssertionError as error:
        return _short(str(error))
    return ""


def _short(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return " ".join(" ".join(lines[-3:]).split())[:LONGEST]
