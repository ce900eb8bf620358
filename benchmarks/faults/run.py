"""The whole fault injection: golden runs first, then every case in turn."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.faults.case import (
    HOWS,
    Case,
    How,
    Kill,
    launcher_cases,
    matrix,
    moments,
    sweeps,
)
from benchmarks.faults.launched import launched
from benchmarks.faults.nursery import Attempt, Nursery
from benchmarks.faults.results import Report
from benchmarks.faults.trainee import Ended
from benchmarks.faults.trial import Trial, attempted
from benchmarks.harness.machine import this_machine

PARTS = ("points", "calls", "moments", "launchers")
NOBODY = Kill(0)


@dataclass
class Bench:
    """Runs cases in a nursery, with one undisturbed run for each way to save."""

    nursery: Nursery
    _golden: dict[How, tuple[Ended, ...]] = field(default_factory=dict)

    def golden(self, how: How) -> tuple[Ended, ...]:
        """What each rank says at the end of an undisturbed run."""
        if how not in self._golden:
            with tempfile.TemporaryDirectory() as folder:
                attempt = self.nursery.start(Path(folder) / "run", Case(how, NOBODY))
            ended = tuple(one for one in attempt.ended if one is not None)
            assert len(ended) == len(attempt.ended), attempt.errors
            self._golden[how] = ended
        return self._golden[how]

    def trial(self, case: Case) -> Trial:
        """Kill, look, start again, compare."""
        kill = launched if case.kill.launcher else self._kill
        return attempted(case, self.golden(case.how), kill, self._again)

    def killed(self, cases: Sequence[Case], count: int) -> Iterator[Trial]:
        """Cases in turn until ``count`` have killed somebody; those that came late, too."""
        for case in cases:
            trial = self.trial(case)
            yield trial
            count -= trial.killed
            if count == 0:
                return

    def _kill(self, run: Path, case: Case) -> Attempt:
        return self.nursery.start(run, case, case.kill.share * self.golden(case.how)[0].seconds)

    def _again(self, run: Path, case: Case) -> Attempt:
        return self.nursery.start(run, replace(case, kill=NOBODY))


def run(parts: Sequence[str], count: int, told: Callable[[str], None]) -> Report:
    """Every case of these parts.

    Args:
        parts: of ``PARTS``.
        count: deaths at random times.
        told: gets a line now and then.
    """
    report = Report(this_machine())
    with Nursery() as nursery:
        bench = Bench(nursery)

        def trials(what: str, cases: Sequence[Case]) -> tuple[Trial, ...]:
            told(f"{what}: {len(cases)} cases")
            return tuple(bench.trial(case) for case in cases)

        if "points" in parts:
            report = replace(report, points=trials("named points", matrix()))
        if "calls" in parts:
            calls = {how: bench.golden(how)[0].calls for how in HOWS}
            report = replace(report, calls=trials("file-system calls", sweeps(calls)))
        if "moments" in parts:
            told(f"random times: {count} deaths")
            found = list(bench.killed(moments(10 * count), count))
            deaths = tuple(trial for trial in found if trial.killed)
            report = replace(report, moments=deaths, missed=len(found) - len(deaths))
        if "launchers" in parts:
            report = replace(report, launchers=trials("launchers", launcher_cases()))
    return report
