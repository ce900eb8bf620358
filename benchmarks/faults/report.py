"""What a run of the fault injection found, and its table: a line for each kind of death."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.faults.case import EVERYBODY
from benchmarks.faults.trial import Trial
from benchmarks.harness.machine import Machine
from benchmarks.harness.tables import aligned


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


HEAD = (
    "killed", "way to save", "rank 0", "rank 1", "all", "exact", "from nothing",
    "ended by the launcher", "slowest end, s",
)  # fmt: skip


def lines(report: Report) -> list[str]:
    """The whole report."""
    kinds = {
        "at a named point": report.points,
        "before a file-system call": report.calls,
        "at a random time": report.moments,
        "the launcher, at a point": report.launchers,
    }
    rows = [row for kind, trials in kinds.items() for row in _rows(kind, trials)]
    every = [trial for trials in kinds.values() for trial in trials]
    exact = len(every) - len(report.wrong)
    text = [str(report.machine), "", *aligned([HEAD, *rows]), ""]
    text.append(f"{exact} of {len(every)} starts after a kill were exact, none with a manual step")
    if report.missed:
        text.append(f"{report.missed} further random times came when all was over")
    return text + [
        f"WRONG: {trial.where}, {_who(trial.who)}, {trial.how}: {'; '.join(trial.wrong)}"
        for trial in report.wrong
    ]


def _rows(kind: str, trials: Sequence[Trial]) -> Iterable[tuple[str, ...]]:
    for how in dict.fromkeys(trial.how for trial in trials):
        some = [trial for trial in trials if trial.how == how]
        yield (
            kind,
            how,
            *(str(sum(trial.who == who for trial in some)) for who in (0, 1, EVERYBODY)),
            f"{sum(not trial.wrong for trial in some)}/{len(some)}",
            str(sum(trial.resumed is None for trial in some)),
            str(sum(trial.hung for trial in some)),
            f"{max(trial.lag for trial in some):.2f}",
        )


def _who(who: int) -> str:
    return "all" if who == EVERYBODY else f"rank {who}"
