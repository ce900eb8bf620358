"""Tables in a Markdown file, kept equal to the reports from which they were made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import benchmarks
from benchmarks.machine import this_machine
from benchmarks.recorded import told, with_tables
from benchmarks.step.host import Host
from benchmarks.step.results import Report, write

FOLDER = Path(benchmarks.__file__ or "").parent
RESULTS = (FOLDER / "RESULTS.md").read_text()


def report(microseconds: float) -> Report:
    return Report(this_machine(), "sgd", hosts=(Host("full_shard", 10, microseconds, 1.0, 2.0),))


def test_results_say_what_was_recorded() -> None:
    """Otherwise run ``python -m benchmarks record``."""
    assert with_tables(RESULTS, FOLDER) == RESULTS


def test_every_recorded_report_is_told() -> None:
    named = set(re.findall(r"<!-- (\S+\.json) -->", RESULTS))
    assert named == {f"results/{path.name}" for path in (FOLDER / "results").glob("*.json")}


def test_a_table_is_renewed_and_what_is_around_it_stays(tmp_path: Path) -> None:
    write(report(123.0), tmp_path / "a.json")
    text = "before\n<!-- a.json -->\n```text\nold\n```\nafter\n```text\nmine\n```\n"
    renewed = with_tables(text, tmp_path)
    assert renewed.startswith("before\n<!-- a.json -->\n```text\n")
    assert renewed.endswith("\n```\nafter\n```text\nmine\n```\n")
    assert "old" not in renewed
    assert "123" in renewed
    assert with_tables(renewed, tmp_path) == renewed


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"machine": 3}')
    with pytest.raises(ValueError, match="machine"):
        told(tmp_path / "a.json")
