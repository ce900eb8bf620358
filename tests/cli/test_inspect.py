"""The command as a user meets it: what it shows, what it finds wrong, and how it ends."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import shardwise as sw
from shardwise.cli import main
from tests.checkpoint.runs import adamw, saved, steps
from tests.copies import seeded
from tests.nets import NETS

DECODER, TIED = NETS[0], NETS[1]


def inspect(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["inspect", *map(str, arguments)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two checkpoints."""
    run = tmp_path_factory.mktemp("run")
    saved(DECODER, 2, run / "step-2")
    saved(TIED, 1, run / "step-4", strategy="no_shard")
    return run


@pytest.fixture
def run(saved_run: Path, tmp_path: Path) -> Path:
    """A copy, to be broken."""
    return Path(shutil.copytree(saved_run, tmp_path / "run", symlinks=True))


def damage(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


# --- what is none ----------------------------------------------------------------------------


def test_a_file_of_another_kind_is_no_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "q.yaml").write_text("model: {width: 64}\n", "utf-8")
    assert inspect(tmp_path / "q.yaml") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(
        f"error: {tmp_path / 'q.yaml'} is not a checkpoint. Pass a run, a checkpoint,"
    )


def test_a_folder_of_runs_says_which_there_are(
    saved_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, runs in (("a", "1 run: a"), ("b", "2 runs: a, b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoints").symlink_to(saved_run)
        assert inspect(tmp_path) == 2
        text = capsys.readouterr().err
        assert text == (
            f"error: {tmp_path} is a folder of {runs}. Name one of them, such as "
            f"{tmp_path / 'a'}.\n"
        )


# --- a run -----------------------------------------------------------------------------------


def test_a_run_is_a_table_of_its_checkpoints(
    saved_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect(saved_run) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{saved_run}: 2 checkpoints, 2 complete, ")
    four, two = (line.split() for line in lines[4:6])
    assert (four[0], four[1], four[4:6], four[-2:]) == (
        "step-4",
        "2",  # as its manifest says
        ["1", "no_shard"],
        ["complete,", "latest"],
    )
    assert (two[0], two[4:6], two[-1]) == ("step-2", ["2", "full_shard"], "complete")
    assert max(map(len, lines[2:])) <= 100


def test_a_broken_checkpoint_of_a_run_is_explained(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "step-2" / "training/optimizer.safetensors").unlink()
    (run / "step-3.partial-0123456789abcdef").mkdir()
    assert inspect(run) == 1
    text = capsys.readouterr().out
    assert "NOT COMPLETE" in text
    assert "step-2: " in text
    assert "training/optimizer.safetensors is missing" in text
    assert "step-3.partial-0123456789abcdef: left by an interrupted save" in text


def test_a_run_can_be_verified(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(run, "--verify") == 0
    damage(run / "step-4" / "model.safetensors", 5000)
    capsys.readouterr()
    assert inspect(run, "--verify") == 1
    text = capsys.readouterr().out
    assert "bytes of step-2: all present ones match their checksums" in text
    assert "bytes of step-4: 1 file is damaged" in text
    assert "DAMAGED model.safetensors: bytes do not match" in text


def test_a_run_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(run / "step-4" / "model.safetensors", 10)
    assert inspect(run, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["latest"] == "step-4"
    assert [(c["name"], c["step"], c["complete"]) for c in report["checkpoints"]] == [
        ("step-4", 2, False),
        ("step-2", 2, True),
    ]
    assert report["checkpoints"][1]["written"]["world"] == 2


# --- a checkpoint ----------------------------------------------------------------------------


def test_a_checkpoint_shows_files_tensors_and_training(
    saved_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect(saved_run / "step-2") == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0] == f"{saved_run / 'step-2'}  complete"
    assert "by 2 ranks, full_shard" in text
    assert "kind        sharded safetensors, written by 2 ranks" in text
    assert "sharded over 2 ranks" in text
    assert "weights: 43 tensors" in text
    (row,) = [line for line in lines if "mlp.up.weight" in line]
    assert row.split() == ["blocks.{0…2}.mlp.up.weight", "3", "×", "[35,", "16]", "float32"]
    assert "for each of 43 parameters:" in text
    assert "exp_avg, exp_avg_sq: in its shape, float32" in text
    assert "step: one number, float32, 2\n" in text
    assert "rng/torch" in text
    assert "group 0: 43 parameters, lr 0.01, betas (0.9, 0.999)" in text
    assert "--verify compares all of them" in lines[-1]
    assert max(map(len, lines[1:])) <= 100


def test_latest_is_a_checkpoint_and_ties_are_named(
    saved_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect(saved_run / "latest") == 0
    text = capsys.readouterr().out
    assert "step 2, " in text
    assert "tied: stored once, under the second name" in text
    assert "lm_head.weight is " in text


def test_every_tensor_has_its_place(saved_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(saved_run / "step-2", "--all") == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [x for x in lines if x.startswith("  embed.weight")]
    assert line == "  embed.weight  [37, 16] float32  model.safetensors 4,096–6,464"


def test_the_whole_state_of_training_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = seeded(DECODER.build)
    sharded = sw.shard(model)
    optimizer = adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    steps(model, optimizer, DECODER, 0, range(1))
    training = sw.Training(
        step=7, scheduler=scheduler, position=("row", 3), config={"lr": 1}, metric=2.5
    )
    sharded.save(tmp_path / "step-7", optimizer, training)
    assert inspect(tmp_path / "step-7") == 0
    text = capsys.readouterr().out
    assert "metric      2.5" in text
    assert "position    ('row', 3)" in text
    assert "scheduler   {'step_size': 5" in text
    assert "config      {'lr': 1}" in text


def test_a_folder_of_somebody_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a": torch.zeros(3), "n": torch.arange(2)}, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        assert inspect(path) == 0
        text = capsys.readouterr().out
        assert "has no manifest, so bytes cannot be checked" in text
        assert "weights: 2 tensors, 28 B (1 int64 16 B, 1 float32 12 B)" in text


def test_damage_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run / "step-2" / "training.json", 100)
    assert inspect(run / "step-2", "--verify", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["complete"], report["training"]) == (False, None)
    (one,) = report["damage"]
    assert (one["file"], one["tensors"]) == ("training.json", [])
    assert report["tensors"]["model"]["embed.weight"]["shape"] == [37, 16]


def test_what_is_not_complete_is_shown_and_the_status(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(run / "step-2" / "training/optimizer.safetensors", 100)
    assert inspect(run / "step-2") == 1
    text = capsys.readouterr().out
    assert text.splitlines()[0].endswith("NOT COMPLETE")
    assert "CUT, has 100" in text
    assert "weights: 43 tensors" in text


def test_nothing_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(tmp_path / "nothing") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "there is no checkpoint here" in err


def test_long_names_are_not_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "model.language_model.layers.0.block_sparse_moe.experts.0.gate_up_projection.weight"
    save_file({name: torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    assert inspect(tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"  {name}  [2, 3]  float32" in lines


# --- names that would do harm ----------------------------------------------------------------

EVIL = "\x1b[2J\x1b[1;1Hcomplete\r\u202e\x07"


def evil(folder: Path) -> Path:
    folder.mkdir()
    save_file({f"w{EVIL}": torch.zeros(3)}, folder / "model.safetensors")
    return folder


def assert_harmless(text: str) -> None:
    assert text.replace("\n", "").isprintable()
    assert "\\x1b[2J" in text or "\\u001b[2J" in text


@pytest.mark.parametrize("options", [(), ("--all",), ("--json",)], ids=str)
def test_names_of_tensors_cannot_drive_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    assert inspect(evil(tmp_path / "a"), *options) == 0
    assert_harmless(capsys.readouterr().out)


def test_nor_those_of_files_and_what_training_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = sw.Training(step=1, position={EVIL: EVIL}, config=EVIL)
    sw.shard(seeded(DECODER.build)).save(tmp_path / "step-1", None, training)
    (tmp_path / "step-1" / f"stranger{EVIL}").touch()
    assert inspect(tmp_path / "step-1") == 0
    assert_harmless(capsys.readouterr().out)


def test_nor_those_in_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(tmp_path / f"nothing{EVIL}") == 2
    assert_harmless(capsys.readouterr().err)


@pytest.mark.parametrize("other", ["/dev/null", "pipe", "loop", "deep"])
def test_whatever_is_named_ends_with_a_status_and_no_traceback(
    tmp_path: Path, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "manifest.json").symlink_to("manifest.json")
    (tmp_path / "deep").mkdir()
    save_file({".".join(["1"] * 1_500): torch.zeros(2)}, tmp_path / "deep" / "model.safetensors")
    expected = {"loop": 1, "deep": 0}.get(other, 2)
    assert inspect(tmp_path / other) == expected
    assert (expected != 2) == (capsys.readouterr().err == "")


def test_options_that_mean_nothing_are_refused(
    saved_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect(saved_run, "--all") == 2
    assert "this is a run" in capsys.readouterr().err


def test_json_has_no_infinity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"x": torch.tensor(torch.inf)}, tmp_path / "a.safetensors")
    assert inspect(tmp_path / "a.safetensors", "--json") == 0
    report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert "inf" in str(report["scalars"])


def test_a_run_with_nothing_whole_is_not_well(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "step-2")
    (run / "step-4").rename(run / "step-4.replaced-0123456789abcdef")
    assert inspect(run, "--verify") == 0
    text = capsys.readouterr().out
    assert "1 checkpoint, 1 complete" in text
    assert "bytes of step-4: all present ones match their checksums" in text
    shutil.rmtree(run / "step-4.replaced-0123456789abcdef")
    (run / "step-5.partial-0123456789abcdef").mkdir()
    assert inspect(run) == 1
    assert "0 checkpoints, 0 complete" in capsys.readouterr().out


def test_a_link_out_of_the_folder_is_a_problem_and_the_rest_is_shown(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "step-2" / "training/optimizer.safetensors"
    path.rename(run.parent / "elsewhere")
    path.symlink_to(run.parent / "elsewhere")
    assert inspect(run / "step-2", "--verify") == 1
    text = capsys.readouterr().out
    assert "NOT READ training/optimizer.safetensors" in text
    assert "weights: 43 tensors" in text


def test_a_checkpoint_is_named_by_its_run(
    saved_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(saved_run, tmp_path / "run" / "checkpoints", symlinks=True)
    assert inspect(tmp_path / "run" / "latest") == 0
    assert str(tmp_path / "run" / "checkpoints") in capsys.readouterr().out
