"""What a comparison of programs says, as one frozen value that goes to JSON and back."""

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
