"""A run in the terminal."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from shardwise.cli.watch import phase, rows, run_watch, sparkline
from shardwise.errors import ConfigError
from shardwise.report.run import Run
from shardwise.train.folder import Folder, is_locked
from tests.report.runs import folder_of_a_run, lines_of_a_run

LINES = lines_of_a_run()


def run_until(number: int) -> Run:
    return Run("run", tuple(LINES[:number]), {}, None)


def test_a_frame_shows_the_last_numbers_of_each_kind() -> None:
    shown = dict(rows(run_until(9), is_running=True, now=1e9 + 70))
    assert shown["phase"] == "training, last record 1:02 ago"
    assert shown["model"] == "1,234 parameters, full_shard over 2 ranks"
    assert shown["step"] == "5 of 8"
    assert shown["loss"] == "2.7500  █▆▅▃▁"
    assert shown["left"] == "1:05"
    assert shown["memory"] == "512.0 MiB of the process that uses most"
    assert shown["last save"] == "step 4, 1.0 MiB, 1:04 ago"
    assert shown["restarts"] == "1, the last at step 4"


def test_a_validation_that_is_not_finite_says_so() -> None:
    run = Run("run", ({"record": "evaluated", "step": 4, "loss": None},), {}, None)
    assert dict(rows(run, is_running=False, now=0.0))["validation"] == "not finite at step 4"


@pytest.mark.parametrize(
    ("number", "is_running", "says"),
    [
        (0, True, "preparing data"),
        (1, True, "taking the first step, last record 0:00 ago"),
        (9, False, "not running, and not finished"),
        (len(LINES), False, "finished"),
    ],
)
def test_a_phase_is_that_of_the_last_record(number: int, is_running: bool, says: str) -> None:
    assert phase(run_until(number), is_running, now=1e9).startswith(says)


def test_a_folder_is_locked_while_its_run_goes_on(tmp_path: Path) -> None:
    with Folder.locked(tmp_path / "run"):
        assert is_locked(tmp_path / "run")
    assert not is_locked(tmp_path / "run")


def test_watching_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, answers = folder_of_a_run(tmp_path / "run"), [True, True, False]
    monkeypatch.setattr("shardwise.cli.watch.is_locked", lambda _: answers.pop(0))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    run_watch(folder, once=False)
    assert answers == []
    assert "finished" in capsys.readouterr().out


def test_a_run_that_prepares_its_data_has_no_log_and_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Folder.locked(tmp_path / "run"):
        run_watch(tmp_path / "run", once=True)
    assert "preparing data" in capsys.readouterr().out


def test_one_frame_is_printed_as_plain_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_watch(folder_of_a_run(tmp_path / "run"), once=True)
    out = capsys.readouterr().out
    assert "8 of 8" in out
    assert "\x1b" not in out


def test_a_sparkline_is_as_wide_as_it_may_be() -> None:
    assert sparkline([1.0]) == "▁"
    assert len(sparkline(list(range(1_000)))) <= 48


def test_a_file_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        run_watch(tmp_path / "metrics.jsonl", once=True)
