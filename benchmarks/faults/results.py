"""What a run of the fault injection says, as one frozen value that goes to JSON and back."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.faults.trial import Trial
from benchmarks.harness.machine import Machine


@dataclass(frozen=True)
class Report:
    """One run."""

    machine: Machine  # where
    points: tuple[Trial, ...] = ()  # deaths at named points
    calls: tuple[Trial, ...] = ()  # deaths before each file-system call of a save
    moments: tuple[Trial, ...] = ()  # deaths at random times
    launchers: tuple[Trial, ...] = ()  # deaths of the launcher at named points
    missed: int = 0  # random times at which all was over already; not among ``moments``
    schema: int = 1  # the version of this format

    @property
    def wrong(self) -> list[Trial]:
        """What was not as it should be."""
        every = (*self.points, *self.calls, *self.moments, *self.launchers)
        return [trial for trial in every if trial.wrong]
