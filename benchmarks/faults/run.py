"""The whole fault injection: undisturbed runs first, then every case in turn."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.faults.case import (
    SAVE_MODES,
    Case,
    Kill,
    SaveMode,
    launcher_cases,
    matrix,
    moments,
    sweeps,
)
from benchmarks.faults.launched import launched
from benchmarks.faults.report import Report
from benchmarks.faults.server import Attempt, RankServer
from benchmarks.faults.training import Final
from benchmarks.faults.trial import Trial, try_case
from benchmarks.harness.machine import this_machine

PARTS = ("points", "calls", "moments", "launchers")
NOBODY = Kill(0)


@dataclass
class Trials:
    """Runs cases in a server, with one undisturbed run for each way to save."""

    server: RankServer
    _undisturbed: dict[SaveMode, tuple[Final, ...]] = field(default_factory=dict)

    def undisturbed(self, how: SaveMode) -> tuple[Final, ...]:
        """What each rank has at the end of an undisturbed run."""
        if how not in self._undisturbed:
            with tempfile.TemporaryDirectory() as folder:
                attempt = self.server.start(Path(folder) / "run", Case(how, NOBODY))
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
        return self.server.start(run, case, case.kill.share * self.undisturbed(case.how)[0].seconds)

    def _again(self, run: Path, case: Case) -> Attempt:
        return self.server.start(run, replace(case, kill=NOBODY))


def run(parts: Sequence[str], count: int, log: Callable[[str], None]) -> Report:
    """Every case of these ``parts`` (of ``PARTS``), with ``count`` deaths at random times."""
    report = Report(this_machine())
    with RankServer() as server:
        trials = Trials(server)

        def all_of(what: str, cases: Sequence[Case]) -> tuple[Trial, ...]:
            log(f"{what}: {len(cases)} cases")
            return tuple(map(trials.trial, cases))

        if "points" in parts:
            report = replace(report, points=all_of("named points", matrix()))
        if "calls" in parts:
            calls = {how: trials.undisturbed(how)[0].calls for how in SAVE_MODES}
            report = replace(report, calls=all_of("file-system calls", sweeps(calls)))
        if "moments" in parts:
            log(f"random times: {count} deaths")
            every = list(trials.killed(moments(10 * count), count))
            deaths = tuple(trial for trial in every if trial.killed)
            report = replace(report, moments=deaths, missed=len(every) - len(deaths))
        if "launchers" in parts:
            report = replace(report, launchers=all_of("launchers", launcher_cases()))
    return report
