"""Curves over the steps."""

from __future__ import annotations

from pathlib import Path

from shardwise.report.run import read_run
from shardwise.report.series import MOST_POINTS, charts, thinned
from tests.report.runs import folder_of_a_run


def test_each_chart_has_the_numbers_of_the_log(tmp_path: Path) -> None:
    run = read_run(folder_of_a_run(tmp_path / "run"))
    by_key = {chart["key"]: chart for chart in charts([run])}
    assert list(by_key) == ["loss", "lr", "grad_norm", "tokens_per_second", "memory"]
    each, mean, validation = by_key["loss"]["curves"]
    assert each["points"] == [(step, 4 - step / 4) for step in range(1, 9)]
    assert mean["points"] == each["points"]  # of a run so short
    assert validation["points"] == [(4, 3.25)]
    assert by_key["tokens_per_second"]["marks"] == [
        {"run": 0, "kind": "restart", "x": 4},
        {"run": 0, "kind": "save", "x": 4},
    ]


def test_a_long_curve_keeps_its_spikes() -> None:
    points = [(step, 1.0) for step in range(100_000)]
    points[77_777] = (77_777, 9.0)
    shown = thinned(points)
    assert len(shown) <= MOST_POINTS
    assert (77_777, 9.0) in shown
    assert shown == sorted(shown)


def test_a_curve_of_one_step_is_a_dot(tmp_path: Path) -> None:
    run = read_run(folder_of_a_run(tmp_path / "run", steps=1))
    assert {curve["style"] for curve in charts([run])[1]["curves"]} == {"dots"}
