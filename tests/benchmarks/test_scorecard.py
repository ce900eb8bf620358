"""The scorecard: how results are judged, and one case with both engines."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.harness.machine import this_machine
from benchmarks.scorecard.case import (
    HANG,
    NAMED,
    RIGHT,
    UNNAMED,
    WRONG,
    Result,
    classified,
    compared,
    of_both,
)
from benchmarks.scorecard.run import CASES, report_of

TRUTH = {"weight": torch.tensor([1.0, -4.0]), "bias": torch.zeros(1)}


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        (TRUTH, RIGHT),
        (TRUTH | {"weight": torch.tensor([1.00001, -4.0])}, RIGHT),
        (TRUTH | {"weight": torch.tensor([1.001, -4.0])}, WRONG),
        (TRUTH | {"weight": torch.tensor([float("nan"), -4.0])}, WRONG),
        (TRUTH | {"bias": torch.tensor([1e-9])}, WRONG),
        (TRUTH | {"weight": torch.tensor([1.0])}, WRONG),
        ({"weight": TRUTH["weight"]}, WRONG),
    ],
    ids=["equal", "rounded", "off", "nan", "not zero", "a shard", "one missing"],
)
def test_values_are_right_where_they_are_plain_trainings(
    values: dict[str, torch.Tensor], outcome: str
) -> None:
    assert compared(values, TRUTH, 2e-5).outcome == outcome


def test_an_error_must_name_everything_that_is_asked_for() -> None:
    error = RuntimeError("rank 1 is at\n gather blocks.0")
    assert classified(error, ("rank 1", "blocks|head")).outcome == NAMED
    assert classified(error, ("rank 1", "tied")).outcome == UNNAMED
    assert classified(error, ()).outcome == UNNAMED


def test_the_worst_rank_counts_but_an_error_is_named_if_one_rank_names_it() -> None:
    results = [Result(outcome) for outcome in (RIGHT, UNNAMED, NAMED, WRONG, HANG)]
    for number, worse in enumerate(results):
        for better in results[: number + 1]:
            assert of_both([better, worse]) == of_both([worse, better]) == worse


def test_only_our_own_failures_fail_the_run() -> None:
    good, bad = Result(RIGHT), Result(HANG, "ranks [1] sent nothing for 30 s")
    machine = this_machine()
    assert report_of(machine, [(CASES[0], bad, good)]).failures == 0
    assert report_of(machine, [(CASES[0], good, bad)]).failures == 1
    line = f"{CASES[0].pain}: {CASES[0].title}: FSDP2: {bad.outcome}: {bad.detail}"
    assert report_of(machine, [(CASES[0], bad, good)]).notes == (line,)


def test_every_pain_has_a_row() -> None:
    pains = {row[0] for table in report_of(this_machine(), []).tables for row in table.rows}
    assert {case.pain for case in CASES} | pains >= {str(number) for number in range(1, 27)}


@pytest.mark.spawn
def test_a_case_is_run_with_both_engines() -> None:
    done = CliRunner().invoke(main, ["scorecard", "--only", "each gradient's norm"])
    assert done.exit_code == 0, done.output
    row = next(line for line in done.output.splitlines() if line.startswith("misuse  each"))
    assert row.split()[-3:] == ["wrong", "clear", "result"]
