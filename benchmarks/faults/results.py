"""What a run of the fault injection says, as one frozen value that goes to JSON and back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.faults.trial import Trial
from benchmarks.machine import Machine

__all__ = ["Report", "read", "write"]

SCHEMA = 1


@dataclass(frozen=True)
class Report:
    """One run.

    Attributes:
        machine: where.
        points: deaths at named points.
        calls: deaths before each file-system call of a save.
        moments: deaths at random times.
        launchers: deaths of the launcher at named points.
        missed: random times at which all was over already; not among ``moments``.
        schema: the version of this format.
    """

    machine: Machine
    points: tuple[Trial, ...] = ()
    calls: tuple[Trial, ...] = ()
    moments: tuple[Trial, ...] = ()
    launchers: tuple[Trial, ...] = ()
    missed: int = 0
    schema: int = SCHEMA

    @property
    def wrong(self) -> list[Trial]:
        """What was not as it should be."""
        every = (*self.points, *self.calls, *self.moments, *self.launchers)
        return [trial for trial in every if trial.wrong]


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
