"""The fault injection as a command: its report goes to JSON and back, and says what went wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.faults.case import EVERYBODY
from benchmarks.faults.run import report_of
from benchmarks.faults.trial import Trial
from benchmarks.harness.machine import this_machine
from benchmarks.harness.report import read

FINE = Trial("new name", "published", 0, True, 2, 0.01, False, ())
BAD = Trial("new name", "at 3% of the time", EVERYBODY, True, None, 2.5, True, ("it is gone",))
LATE = Trial("new name", "at 99% of the time", 0, False, 4, 0.0, False, ())


def test_a_report_says_what_was_exact_and_what_was_not() -> None:
    deaths = {"at a named point": [FINE, FINE], "at a random time": [BAD, LATE]}
    report = report_of(this_machine(), deaths)
    assert report.tables[0].rows == (
        ("at a named point", "new name", 2, 0, 0, "2/2", 0, 0, 0.01),
        ("at a random time", "new name", 0, 0, 1, "0/1", 1, 1, 2.5),
    )
    assert report.notes == (
        "2 of 3 starts after a kill were exact, none with a manual step",
        "1 further random times came when all was over",
        "WRONG: at 3% of the time, all, new name: it is gone",
    )
    assert report.failures == 1


@pytest.mark.prove
@pytest.mark.spawn
def test_the_command_writes_what_it_tells(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    arguments = ["faults", "--part", "moments", "--random", "1", "--json", str(path)]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "1 of 1 starts after a kill were exact" in done.output
    assert "\n".join(read(path).lines()) in done.output
