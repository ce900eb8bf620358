"""What a run's folder holds, and what it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli import watch
from shardwise.errors import ConfigError
from shardwise.report.page import page
from shardwise.report.run import read_run
from tests.report.runs import STEP, folder_of_a_run


def test_the_files_of_a_run_are_read(tmp_path: Path) -> None:
    run = read_run(folder_of_a_run(tmp_path / "run"))
    assert run.name == "run"
    assert [line["step"] for line in run.of("stepped")] == list(range(1, 9))
    assert run.last("evaluated")["loss"] == 3.25
    assert run.last("warned") == {}
    assert run.recipe["model.width"] == 16
    assert run.step is not None
    assert run.step["step"] == 3


def test_torn_and_missing_files_are_no_error(tmp_path: Path) -> None:
    folder = folder_of_a_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"record": "step')
    (folder / "step.json").write_text("{", "utf-8")
    (folder / "recipe.yaml").unlink()
    run = read_run(folder)
    assert run.lines[-1]["record"] == "finished"
    assert run.step is None
    assert run.recipe == {}


def test_lines_and_steps_of_another_version_are_as_if_they_were_not_there(tmp_path: Path) -> None:
    folder = folder_of_a_run(tmp_path / "run")
    before = read_run(folder).lines
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"record": "stepped", "step": 9, "time": 1.0}\n{"record": ["saved"]}\n')
        file.write('{"record": "sampled", "time": 1.0}\n{"record": "finished", "step": "x"}\n')
    (folder / "step.json").write_text('{"step": 3}', "utf-8")
    run = read_run(folder)
    assert run.lines == before
    assert run.step is None


@pytest.mark.parametrize(
    "damaged",
    [
        {"record": "stepped", "step": 9, "loss": "?"},
        {"record": "stepped", "step": 9, "tokens_per_second": float("inf")},
        {"record": "stepped", "step": 9, "memory": [1]},
        {"record": "stepped", "step": 9, "time": None},
        {"record": "built", "units": [{"name": 1}]},
        {"record": "built", "versions": ["torch"]},
        {"record": "saved", "nbytes": {}},
        {"record": ["saved"]},
    ],
)
def test_lines_whose_values_are_of_other_types_are_left_out(
    tmp_path: Path, damaged: dict[str, object]
) -> None:
    folder = folder_of_a_run(tmp_path / "run")
    run = read_run(folder)
    whole = run.last(damaged["record"]) if isinstance(damaged["record"], str) else {}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**(whole or run.lines[-1]), **damaged}) + "\n")
    again = read_run(folder)
    assert again.lines == run.lines
    assert page([again])
    assert watch.rows(again, True, 0.0)


def test_values_that_are_read_as_another_type_are_of_that(tmp_path: Path) -> None:
    """And half a surrogate pair, as in names of files, is no end of the page."""
    folder = folder_of_a_run(tmp_path / "run")
    last = read_run(folder).last("stepped")
    warned = {"record": "warned", "time": 1.0, "message": "caf\udce9"}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**last, "loss": "2.5", "memory": 7.0}) + "\n")
        file.write(json.dumps(warned) + "\n")
    (folder / "step.json").write_text(json.dumps({**STEP, "planned_most": None}), "utf-8")
    (folder / "recipe.yaml").write_text("{1: {2: x}}", "utf-8")
    run = read_run(folder)
    assert (run.last("stepped")["loss"], run.last("stepped")["memory"]) == (2.5, 7)
    assert run.last("warned")["message"] == "caf?"
    assert page([run]).encode()
    assert run.recipe == {"1.2": "x"}


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not the folder of a run: metrics\.jsonl cannot be"):
        read_run(tmp_path)
    for text in ("", "{}\n", "\x00\xff", "epoch,loss\n1,2\n"):
        (tmp_path / "metrics.jsonl").write_text(text, "utf-8")
        with pytest.raises(ConfigError, match=r"metrics\.jsonl has no record that can be read"):
            read_run(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        {"moments": 3},
        {"moments": [[0.0, [1, 2], None]]},
        {"kinds": None},
        {"planned": [1]},
        {"planned_most": {"gathered": 1}},
        {"moments": [[float("nan"), [1] * 6, None]]},
    ],
)
def test_a_step_of_another_form_is_as_if_it_were_not_there(
    tmp_path: Path, changed: dict[str, object]
) -> None:
    folder = folder_of_a_run(tmp_path / "run")
    (folder / "step.json").write_text(json.dumps({**STEP, **changed}), "utf-8")
    assert read_run(folder).step is None
    assert page([read_run(folder)])
