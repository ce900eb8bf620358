"""The fault injection as a command: its report goes to JSON and back, and says what went wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.faults.case import EVERYBODY
from benchmarks.faults.report import Report, lines
from benchmarks.faults.trial import Trial
from benchmarks.harness.machine import this_machine
from benchmarks.harness.reports import read
from benchmarks.recorded import table_of

FINE = Trial("new name", "published", 0, True, 2, 0.01, False, ())
BAD = Trial("new name", "at 3% of the time", EVERYBODY, True, None, 2.5, True, ("it is gone",))


def test_a_report_says_what_was_exact_and_what_was_not() -> None:
    text_lines = lines(Report(this_machine(), points=(FINE, FINE), moments=(BAD,), missed=4))
    text = "\n".join(text_lines)
    assert "2 of 3 starts after a kill were exact" in text
    assert "4 further random times came when all was over" in text
    assert text_lines[-1] == "WRONG: at 3% of the time, all, new name: it is gone"
    point = next(line for line in text_lines if line.startswith("at a named point"))
    assert point.split()[-7:] == ["2", "0", "0", "2/2", "0", "0", "0.01"]
    moment = next(line for line in text_lines if line.startswith("at a random time"))
    assert moment.split()[-7:] == ["0", "0", "1", "0/1", "1", "1", "2.50"]


@pytest.mark.spawn
def test_the_command_writes_what_it_tells(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    arguments = ["faults", "--part", "moments", "--random", "1", "--json", str(path)]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "1 of 1 starts after a kill were exact" in done.output
    assert table_of(path) in done.output
    report = read(Report, path)
    assert len(report.moments) == 1
    assert report.wrong == []
