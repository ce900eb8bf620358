"""What all benchmarks share: rounds, report files, pictures, and the recorded tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import benchmarks
from benchmarks.checkpoint.report import Report as CheckpointReport
from benchmarks.faults.report import Report as FaultsReport
from benchmarks.gpu.report import Report as GpuReport
from benchmarks.harness.machine import this_machine
from benchmarks.harness.plots import Bar, draw
from benchmarks.harness.reports import read, write
from benchmarks.harness.rounds import quartiles, rotated
from benchmarks.programs.report import Report as ProgramsReport
from benchmarks.recorded import table_of, with_tables
from benchmarks.step.host import Host
from benchmarks.step.report import Report as StepReport

FOLDER = Path(benchmarks.__file__ or "").parent
RESULTS = (FOLDER / "RESULTS.md").read_text()
MACHINE = this_machine()
STEP = StepReport(MACHINE, "sgd", hosts=(Host("full_shard", 10, 123.0, 1.0, 2.0),))
REPORTS = {
    "step.json": STEP,
    "gpu.json": GpuReport(MACHINE, "H200", "", "own", "torch"),
    "checkpoint.json": CheckpointReport(MACHINE, 1.0, 3),
    "faults.json": FaultsReport(MACHINE, missed=3),
    "programs.json": ProgramsReport(MACHINE, 2, ()),
}


def test_everybody_is_first_once_and_then_the_order_turns_round() -> None:
    orders = ["".join(rotated(list("abc"), number)) for number in range(6)]
    assert orders == ["abc", "bca", "cab", "cba", "acb", "bac"]
    assert quartiles([2.0, 1.5, 2.0]) == (1.75, 2.0, 2.0)


# ---- files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_survives_its_file_and_a_foreign_field_is_refused(
    name: str, tmp_path: Path
) -> None:
    report: Any = REPORTS[name]
    path = tmp_path / name
    write(report, path)
    assert read(type(report), path) == report
    good = json.loads(path.read_text("utf-8"))
    without = {key: value for key, value in good.items() if key != "machine"}
    for bad in (good | {"colour": "red"}, good | {"schema": "one"}, without):
        path.write_text(json.dumps(bad), "utf-8")
        with pytest.raises(ValueError, match=r"fields that|validation error"):
            table_of(path)


def test_a_picture_is_drawn_of_panels_that_exist(tmp_path: Path) -> None:
    bars = [Bar("a", 1.5, "#4477aa", low=1.2, high=1.7), Bar("b", 0.8, "#bbbbbb", target=0.9)]
    draw("title", {"one": bars, "other": bars[:1]}, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    draw("title", {}, tmp_path / "empty.png")
    assert not (tmp_path / "empty.png").exists()


# ---- recorded tables -----------------------------------------------------------------------


def test_results_are_what_was_recorded() -> None:
    """Otherwise run ``python -m benchmarks record``."""
    assert with_tables(RESULTS, FOLDER) == RESULTS


def test_every_recorded_report_has_its_table() -> None:
    named = set(re.findall(r"<!-- (\S+\.json) -->", RESULTS))
    assert named == {f"results/{path.name}" for path in (FOLDER / "results").glob("*.json")}


def test_a_table_is_renewed_and_what_is_around_it_stays(tmp_path: Path) -> None:
    write(STEP, tmp_path / "a.json")
    text = "before\n<!-- a.json -->\n```text\nold\n```\nafter\n```text\nmine\n```\n"
    renewed = with_tables(text, tmp_path)
    assert renewed.startswith("before\n<!-- a.json -->\n```text\n")
    assert renewed.endswith("\n```\nafter\n```text\nmine\n```\n")
    assert "old" not in renewed
    assert "123" in renewed
    assert with_tables(renewed, tmp_path) == renewed
