"""The command as a user meets it: its help, its errors, and whole runs through both launchers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.train.recipe import keys
from tests.train.tiny import recipe_file

Two = tuple[Path, subprocess.CompletedProcess[str]]

STANDALONE = ("--nproc-per-node", "2", "--standalone", "--local-addr", "127.0.0.1")
SRC = str(Path(__file__).parents[2] / "src")


def losses(folder: Path) -> list[float]:
    lines = (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([SRC, *sys.path])}
    return subprocess.run(
        [sys.executable, "-m", *command],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def failed(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["train", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


# --- reading ---------------------------------------------------------------------------------


def test_help_shows_how_to_start_and_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert failed("--help") == 0
    said = capsys.readouterr().out
    assert "shardwise train recipes/demo.yaml --nproc 2" in said
    assert "torchrun --nproc-per-node 2 -m shardwise.cli train" in said
    assert [key.name for key in keys() if f"{key.name}: " not in said] == []


def test_the_command_line_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "train  Train a language model, sharded." in capsys.readouterr().out


def test_a_missing_recipe_is_an_error_of_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert failed() == 2
    assert "Missing argument 'RECIPE'" in capsys.readouterr().err


# --- errors before any process is started ----------------------------------------------------


def test_a_wrong_key_ends_with_one_message_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failed(str(recipe_file(tmp_path)), "--nproc", "2", "--model.widht", "3") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        (
            "error: override --model.widht: there is no such key; nearest are model.width, "
            "model.tied, model.hidden."
        )
    ]


def test_a_batch_that_does_not_divide_ends_before_ranks_are_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failed(str(recipe_file(tmp_path)), "--nproc", "5") == 1
    assert "batch.rows is 12, and batch.micro 1 × 5 ranks = 5" in capsys.readouterr().err


def test_a_folder_in_use_ends_before_ranks_are_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_file(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").touch()
    assert failed(str(recipe), "--nproc", "2") == 1
    assert "replace that run with --run.overwrite true" in capsys.readouterr().err


def test_asking_for_processes_inside_a_launcher_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert failed(str(recipe_file(tmp_path)), "--nproc", "2") == 1
    assert "--nproc is 2, but a launcher has started 1 processes" in capsys.readouterr().err


# --- whole runs ------------------------------------------------------------------------------


def test_one_process_needs_no_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipe_file(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["train", str(recipe), "run.seed=3", "--run.steps", "3", "--run.eval_every=0"])
    assert caught.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "full_shard over 1 rank" in out
    assert "step 3/3" in out
    assert len(losses(tmp_path)) == 4


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    """The folder of a run on two processes, and what it said."""
    folder = tmp_path_factory.mktemp("two")
    return folder, run("shardwise.cli", "train", str(recipe_file(folder)), "--nproc", "2")


@pytest.mark.spawn
def test_two_processes_train_and_only_one_speaks(two: Two) -> None:
    _, done = two
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("step 4/4") == 1
    assert "1 micro × 6 accumulation × 2 ranks" in done.stdout


@pytest.mark.spawn
def test_two_processes_train_as_one_does(two: Two, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["train", str(recipe_file(tmp_path))])
    assert losses(two[0]) == pytest.approx(losses(tmp_path), rel=1e-5)


@pytest.mark.spawn
def test_torchrun_is_as_good(two: Two, tmp_path: Path) -> None:
    command = ("-m", "shardwise.cli", "train", str(recipe_file(tmp_path)))
    done = run("torch.distributed.run", *STANDALONE, *command)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == losses(two[0])


@pytest.mark.spawn
def test_a_rank_s_error_is_all_that_is_said(tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path)
    done = run("shardwise.cli", "train", str(recipe), "--nproc", "2", "data.source=/nowhere")
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: rank 0: data.source '/nowhere' does not exist")


@pytest.mark.spawn
def test_a_rank_s_error_is_said_under_torchrun_too(tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path)
    command = ("-m", "shardwise.cli", "train", str(recipe), "data.source=/nowhere")
    done = run("torch.distributed.run", *STANDALONE, *command)
    assert done.returncode == 1
    assert "data.source '/nowhere' does not exist" in done.stderr
