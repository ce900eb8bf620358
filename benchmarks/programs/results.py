"""What a comparison of programs says, as one frozen value that goes to JSON and back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.machine import Machine

__all__ = ["VERDICTS", "Outcome", "Report", "read", "write"]

SCHEMA = 1
VERDICTS = ("equal", "refused", "other numbers", "error", "crash", "hang")


@dataclass(frozen=True)
class Outcome:
    """One program under one engine.

    Attributes:
        engine, program: their names.
        kind: the file in which the program stands.
        about: what the program does, in a line.
        verdict: "equal" to plain PyTorch; "refused" by an error of shardwise's own; "other
            numbers"; an "error" of anybody else; a "crash" of the process; a "hang".
        detail: what differs, or the error.
    """

    engine: str
    program: str
    kind: str
    about: str
    verdict: str
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """One run.

    Attributes:
        machine: where.
        world: ranks.
        outcomes: engine by engine, in the order of the programs.
        schema: the version of this format.
    """

    machine: Machine
    world: int
    outcomes: tuple[Outcome, ...]
    schema: int = SCHEMA


ADAPTER = TypeAdapter(Report)


def write(report: Report, path: Path) -> None:
    """As JSON."""
    path.write_bytes(ADAPTER.dump_json(report, indent=1) + b"\n")


def read(path: Path) -> Report:
    """From JSON.

    Raises:
        ValueError: a field is missing, unknown, or of another type.
    """
    text = path.read_bytes()
    report = ADAPTER.validate_json(text, strict=True)
    if ADAPTER.dump_python(report, mode="json") != json.loads(text):
        raise ValueError(f"{path} has fields that a report of schema {SCHEMA} has not")
    return report
