"""The tables of a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.report import facts
from shardwise.report.run import Run, read_run
from tests.report.runs import folder_of_a_run


def test_results_are_the_last_numbers_of_the_log(tmp_path: Path) -> None:
    shown = dict(facts.results([read_run(folder_of_a_run(tmp_path / "run"))]))
    assert shown["steps"] == "8 of 8"
    assert shown["ended"] == "finished"
    assert shown["training loss"] == "2.0000"
    assert shown["validation loss"] == "3.2500"
    assert shown["sharding"] == "full_shard over 2 ranks"
    assert shown["memory"] == "512.0 MiB"
    assert shown["versions"] == "python 3.11, torch 2.13"


@pytest.mark.parametrize(
    ("planned", "measured", "shown"),
    [
        (2000.0, 1000.0, "2,000 planned, 1,000 measured (-50%)"),
        (None, 1000.0, "1,000 measured, no plan without --machines"),
        (2000.0, None, "2,000 planned"),
        (None, None, "not known without --machines"),
    ],
)
def test_what_has_no_plan_says_what_gives_it_one(
    planned: float | None, measured: float | None, shown: str
) -> None:
    line = {"record": "compared", "elapsed": 1.0, "rate": measured, "planned_rate": planned}
    results = dict(facts.results([Run("run", (line,), {}, None)]))
    assert results["tokens/s beside the plan"] == shown


def test_what_a_run_has_not_recorded_is_missing() -> None:
    shown = dict(facts.results([Run("run", (), {}, None)]))
    assert shown["ended"] == "not finished"
    assert shown["machine"] == shown["training loss"] == "missing"
    assert shown["restarts"] == "0"


def test_a_run_that_went_on_after_its_end_has_not_finished() -> None:
    lines = tuple({"record": kind, "elapsed": 1.0} for kind in ("stopped", "resumed", "warned"))
    built = {"record": "built", "strategy": "zero1", "ranks": 1, "elapsed": 2.0}
    shown = dict(facts.results([Run("run", (*lines, built), {}, None)]))
    assert (shown["ended"], shown["sharding"]) == ("not finished", "zero1 over 1 rank")


def test_recipes_show_what_differs_from_defaults_and_from_each_other(tmp_path: Path) -> None:
    runs = [
        read_run(folder_of_a_run(tmp_path / "one")),
        read_run(folder_of_a_run(tmp_path / "two", "optimizer.lr=3e-3")),
    ]
    by_key = {row[0]: row[1:] for row in facts.recipe_rows(runs)}
    assert by_key["optimizer.lr"] == ["0.002", "0.01", "0.003"]
    assert "optimizer.clip" not in by_key
    differing = [
        row for row in facts.differences(runs) if not row[0].endswith(("source", "folder"))
    ]
    assert differing == [["optimizer.lr", "0.01", "0.003"]]
