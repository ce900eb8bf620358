"""Every program under every engine, in ranks that are replaced when a program ends badly.

A program that raises leaves its group in pieces, and one that hangs or crashes never reports. So
each engine has ranks that run one program after another, and new ranks from the program on that
did not end well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

import shardwise as sw
from benchmarks.harness.machine import this_machine
from benchmarks.harness.workers import Worker, Workers
from benchmarks.programs import changes, loops, models, values  # noqa: F401 - they register
from benchmarks.programs.engines import ENGINES, Engine, Plain
from benchmarks.programs.program import PROGRAMS, Program, Values
from benchmarks.programs.report import Outcome, Report

TIMEOUT = 240.0  # seconds for a program; compiling with inductor takes a minute on a busy machine
LONGEST = 300  # characters of an error that are kept


def run(
    world: int, names: Sequence[str], engines: Sequence[str], log: Callable[[str], None]
) -> Report:
    """Run programs under engines.

    Args:
        world: ranks.
        names: of programs.
        engines: their names.
        log: is called with each outcome.
    """
    outcomes = [
        outcome for engine in engines for outcome in _all_under(engine, world, list(names), log)
    ]
    return Report(this_machine(), world, tuple(outcomes))


def _all_under(
    engine: str, world: int, names: list[str], log: Callable[[str], None]
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    while len(outcomes) < len(names):
        left = names[len(outcomes) :]
        with Workers(world, _rank, engine, left, timeout=TIMEOUT) as ranks:
            for name in left:
                outcome = _outcome(ranks, engine, name)
                outcomes.append(outcome)
                log(f"{engine}: {name}: {outcome.verdict} {outcome.detail}".strip())
                if outcome.verdict != "equal":
                    ranks.stop()
                    break
    return outcomes


def _outcome(ranks: Workers, engine: str, name: str) -> Outcome:
    program = PROGRAMS[name]
    start = Outcome(engine, name, program.kind, program.about, "equal")
    try:
        verdicts = ranks.receive()
    except RuntimeError as error:
        verdict = "hang" if "sent nothing" in str(error) else "crash"
        return replace(start, verdict=verdict, detail=_short(str(error)))
    worst = next((pair for pair in verdicts if pair[0] != "equal"), verdicts[0])
    return replace(start, verdict=worst[0], detail=worst[1])


def _rank(worker: Worker, engine: str, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    with worker.group():
        under = ENGINES[engine]()
        for name in names:
            worker.send(_verdict(PROGRAMS[name], under))


def _verdict(program: Program, engine: Engine) -> tuple[str, str]:
    torch.manual_seed(0)
    expected = program.run(Plain())
    torch.manual_seed(0)
    try:
        values = program.run(engine)
    except sw.RanksDisagree as error:
        return "error", _short(f"{type(error).__name__}: {error}")
    except sw.ShardwiseError as error:
        return "refused", _short(str(error))
    except Exception as error:  # noqa: BLE001 - whatever a user would see
        return "error", _short(f"{type(error).__name__}: {error}")
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
