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
from torch import Tensor

import shardwise as sw
from benchmarks.harness.machine import this_machine
from benchmarks.harness.workers import Worker, Workers
from benchmarks.programs import changes, loops, models, values  # noqa: F401 - they register
from benchmarks.programs.engines import ENGINES, Engine, Plain
from benchmarks.programs.program import PROGRAMS, Program
from benchmarks.programs.results import Outcome, Report

TIMEOUT = 240.0  # seconds for a program; compiling with inductor takes a minute on a busy machine
LONGEST = 300  # characters of an error that are kept


def run(
    world: int, names: Sequence[str], engines: Sequence[str], say: Callable[[str], None]
) -> Report:
    """Run programs under engines.

    Args:
        world: ranks.
        names: of programs.
        engines: their names.
        say: is told each outcome.
    """
    outcomes = [
        outcome for engine in engines for outcome in _all_under(engine, world, list(names), say)
    ]
    return Report(this_machine(), world, tuple(outcomes))


def _all_under(
    engine: str, world: int, names: list[str], say: Callable[[str], None]
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    while len(outcomes) < len(names):
        left = names[len(outcomes) :]
        with Workers(world, _rank, engine, left, timeout=TIMEOUT) as ranks:
            for name in left:
                outcome = _outcome(ranks, engine, name)
                outcomes.append(outcome)
                say(f"{engine}: {name}: {outcome.verdict} {outcome.detail}".strip())
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
        for name in names:
            worker.send(_verdict(PROGRAMS[name], ENGINES[engine]()))


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
    worst = difference(expected, values, program.tolerance)
    return ("equal", "") if worst is None else ("other numbers", worst)


def difference(expected: Any, value: Any, tolerance: float, name: str = "") -> str | None:
    """The first difference of what a program returned from the plain program's, or ``None``."""
    if isinstance(expected, dict):
        if expected.keys() != value.keys():
            return f"{name}: other names {sorted(expected.keys() ^ value.keys())[:3]}"
        pairs = [(f"{name}.{key}".lstrip("."), expected[key], value[key]) for key in expected]
    elif isinstance(expected, list):
        if len(expected) != len(value):
            return f"{name}: {len(value)} entries, and plain {len(expected)}"
        pairs = [
            (f"{name}[{i}]", a, b) for i, (a, b) in enumerate(zip(expected, value, strict=True))
        ]
    else:
        return _leaf_difference(expected, value, tolerance, name)
    return next((d for n, a, b in pairs if (d := difference(a, b, tolerance, n))), None)


def _leaf_difference(expected: Any, value: Any, tolerance: float, name: str) -> str | None:
    if not isinstance(expected, (Tensor, float)):
        return None if expected == value else f"{name}: {value!r}, and plain {expected!r}"
    a, b = torch.as_tensor(expected), torch.as_tensor(value)
    if a.shape != b.shape:
        return f"{name}: shape {tuple(b.shape)}, and plain {tuple(a.shape)}"
    if torch.allclose(a, b.to(a.dtype), rtol=tolerance, atol=tolerance, equal_nan=True):
        return None
    return f"{name} differs from plain by {(a - b).abs().max().item():.3g}"


def _short(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return " ".join(" ".join(lines[-3:]).split())[:LONGEST]
