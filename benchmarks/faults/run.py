"""The whole fault injection: undisturbed runs first, then every case in turn; and its table."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.faults.case import (
    EVERYBODY,
    SAVE_MODES,
    Case,
    Kill,
    SaveMode,
    launcher_cases,
    matrix,
    moments,
    sweeps,
)
from benchmarks.faults.server import Attempt, launched, start
from benchmarks.faults.training import Final
from benchmarks.faults.trial import Trial, try_case
from benchmarks.harness.command import Log, setting
from benchmarks.harness.machine import Machine, this_machine
from benchmarks.harness.report import Cell, Column, Report, Table

PARTS = ("points", "calls", "moments", "launchers")
NOBODY = Kill(0)
COLUMNS = (
    Column("killed"), Column("way to save"), Column("rank 0"), Column("rank 1"), Column("all"),
    Column("exact"), Column("from nothing"), Column("ended by the launcher"),
    Column("slowest end, s", ".2f"),
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """The cases that run."""

    part: tuple[str, ...] = setting(PARTS, "which kinds of death", PARTS)
    random: int = setting(30, "deaths at random times", least=1)


@dataclass
class Trials:
    """Runs cases, with one undisturbed run for each way to save."""

    _undisturbed: dict[SaveMode, tuple[Final, ...]] = field(default_factory=dict)

    def undisturbed(self, how: SaveMode) -> tuple[Final, ...]:
        """What each rank has at the end of an undisturbed run."""
        if how not in self._undisturbed:
            with tempfile.TemporaryDirectory() as folder:
                attempt = start(Path(folder) / "run", Case(how, NOBODY))
            finals = tuple(final for final in attempt.finals if final is not None)
            assert len(finals) == len(attempt.finals), attempt.errors
            self._undisturbed[how] = finals
        return self._undisturbed[how]

    def trial(self, case: Case) -> Trial:
        """Kill, look, start again, compare."""
        kill = launched if case.kill.launcher else self._kill
        return try_case(case, self.undisturbed(case.how), kill, self._again)

    def killed(self, cases: Sequence[Case], count: int) -> Iterator[Trial]:
        """Cases in turn until ``count`` have killed somebody; those that came late, too."""
        for case in cases:
            trial = self.trial(case)
            yield trial
            count -= trial.killed
            if count == 0:
                return

    def _kill(self, run: Path, case: Case) -> Attempt:
        return start(run, case, case.kill.share * self.undisturbed(case.how)[0].seconds)

    def _again(self, run: Path, case: Case) -> Attempt:
        return start(run, replace(case, kill=NOBODY))


def run(config: Config, log: Log) -> Iterator[Report]:
    """Kill ranks and launchers at every moment of a save, and start them again."""
    trials, machine = Trials(), this_machine()
    done: dict[str, list[Trial]] = {}
    for kind, cases, count in _cases(config, trials):
        log(f"{kind}: {count} deaths")
        done[kind] = list(trials.killed(cases, count))
        yield report_of(machine, done)


def _cases(config: Config, trials: Trials) -> Iterator[tuple[str, list[Case], int]]:
    """Each kind of death with its cases, and how many deaths are wanted."""
    if "points" in config.part:
        yield "at a named point", (cases := matrix()), len(cases)
    if "calls" in config.part:
        calls = {how: trials.undisturbed(how)[0].calls for how in SAVE_MODES}
        yield "before a file-system call", (cases := sweeps(calls)), len(cases)
    if "moments" in config.part:
        yield "at a random time", moments(10 * config.random), config.random
    if "launchers" in config.part:
        yield "the launcher, at a point", (cases := launcher_cases()), len(cases)


# ---- the report ----------------------------------------------------------------------------


def report_of(machine: Machine, done: Mapping[str, Sequence[Trial]]) -> Report:
    """A row for each kind of death (the keys of ``done``) and way to save, and what was wrong.

    Random times that killed nobody came when all was over, and are only counted.
    """
    trials = {
        kind: [trial for trial in each if trial.killed or "random" not in kind]
        for kind, each in done.items()
    }
    every = [trial for each in trials.values() for trial in each]
    wrong = [trial for trial in every if trial.wrong]
    missed = sum(map(len, done.values())) - len(every)
    exact = f"{len(every) - len(wrong)} of {len(every)} starts after a kill were exact"
    text = [f"{exact}, none with a manual step"]
    if missed:
        text.append(f"{missed} further random times came when all was over")
    for trial in wrong:
        who = "all" if trial.who == EVERYBODY else f"rank {trial.who}"
        text.append(f"WRONG: {trial.where}, {who}, {trial.how}: {'; '.join(trial.wrong)}")
    rows = tuple(row for kind, each in trials.items() for row in _rows(kind, each))
    return Report(machine, (), (Table("", COLUMNS, rows),), tuple(text), failures=len(wrong))


def _rows(kind: str, trials: Sequence[Trial]) -> Iterator[tuple[Cell, ...]]:
    for how in dict.fromkeys(trial.how for trial in trials):
        of_mode = [trial for trial in trials if trial.how == how]
        yield (
            kind,
            how,
            *(sum(trial.who == who for trial in of_mode) for who in (0, 1, EVERYBODY)),
            f"{sum(not trial.wrong for trial in of_mode)}/{len(of_mode)}",
            sum(trial.resumed is None for trial in of_mode),
            sum(trial.hung for trial in of_mode),
            max(trial.lag for trial in of_mode),
        )
