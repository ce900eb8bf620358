"""What a comparison of programs found, and its table: a line for each program."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.harness.machine import Machine

VERDICTS = ("equal", "refused", "other numbers", "error", "crash", "hang")


@dataclass(frozen=True)
class Outcome:
    """One program under one engine."""

    engine: str  # their names
    program: str
    kind: str  # the file in which the program stands
    about: str  # what the program does, in a line
    # "equal" to plain PyTorch; "refused" by an error of shardwise's own; "other numbers"; an
    # "error" of anybody else; a "crash" of the process; a "hang"
    verdict: str
    detail: str = ""  # what differs, or the error


@dataclass(frozen=True)
class Report:
    """One run."""

    machine: Machine  # where
    world: int  # ranks
    outcomes: tuple[Outcome, ...]  # engine by engine, in the order of the programs
    schema: int = 1  # the version of this format


def lines(report: Report) -> list[str]:
    """The whole report."""
    engines = list(dict.fromkeys(outcome.engine for outcome in report.outcomes))
    programs = {outcome.program: outcome for outcome in report.outcomes}
    verdicts = {(o.program, o.engine): o.verdict for o in report.outcomes}
    width = max(map(len, programs))
    text = [str(report.machine), "", f"{report.world} ranks, each program against plain PyTorch"]
    head = "  ".join(f"{engine:<13}" for engine in engines)
    text += ["", f"{'program':<{width}}  {head}  what it does"]
    for name, outcome in programs.items():
        columns = "  ".join(f"{verdicts[name, engine]:<13}" for engine in engines)
        text.append(f"{name:<{width}}  {columns}  {outcome.about}")
    bad = [outcome for outcome in report.outcomes if outcome.verdict != "equal"]
    text += ["", *(f"{engine}: {_summary(report, engine)}" for engine in engines)]
    return [*text, "", *(f"{o.engine}, {o.program}: {o.verdict}: {o.detail}" for o in bad)]


def _summary(report: Report, engine: str) -> str:
    verdicts = [outcome.verdict for outcome in report.outcomes if outcome.engine == engine]
    counts = [(verdicts.count(verdict), verdict) for verdict in VERDICTS]
    return f"{len(verdicts)} programs: " + ", ".join(f"{n} {v}" for n, v in counts if n)
