"""``shardwise init``: asked at a terminal, and what is written."""

from __future__ import annotations

import io
import os
import pty
import sys
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.cli.init import questions
from shardwise.recipe.read import read_recipe
from tests.dialects.test_interpret import ASKED_V1

ANSWERS = {
    "What starts the ranks": "slurm",
    "Machines": "4",
    "Ranks of each machine": "8",
    "Strategy": "hybrid_shard",
    "Precision": "bf16",
}


def test_a_terminal_is_asked_a_few_questions_once(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "shardwise.cli", "init", str(file)])
    text, answers = "", dict(ANSWERS)
    while chunk := _read(terminal):
        text += chunk
        last = text.splitlines()[-1]
        for question in [each for each in answers if last.startswith(each) and last.endswith(": ")]:
            os.write(terminal, f"{answers.pop(question)}\n".encode())
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, text
    assert answers == {}
    recipe = read_recipe(file)
    assert (recipe.launch.by, recipe.launch.nodes, recipe.launch.nproc) == ("slurm", 4, 8)
    assert recipe.launch.address is None  # SLURM knows it
    assert recipe.sharding.strategy == "hybrid_shard"
    assert recipe.sharding.precision.param_dtype == "bfloat16"
    assert f"wrote     {file}: shardwise launch {file}" in text


def _read(terminal: int) -> str:
    try:
        return os.read(terminal, 4096).decode()
    except OSError:  # of Linux, when the other end is closed
        return ""


def test_an_input_that_ends_too_early_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("slurm\n"))
    with pytest.raises(SystemExit, match="1"):
        main(["init", str(tmp_path / "my.yaml")])
    assert "error: the input ended before all was answered" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_what_accelerate_config_wrote_is_taken_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerates, file = tmp_path / "default_config.yaml", tmp_path / "my.yaml"
    accelerates.write_text(ASKED_V1, "utf-8")
    arguments = ["init", str(file), "--accelerate", str(accelerates), "--yes"]
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    launch = read_recipe(file).launch
    assert launch.model_dump(include={"nodes", "nproc", "address", "port"}) == EXPECTED
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert "exists and is not replaced" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("base_model: llama\nmicro_batch_size: 2\n", "knows none of base_model, micro_batch_size"),
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 3\n", "fsdp_version"),
    ],
)
def test_a_file_that_accelerate_has_not_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, words: str
) -> None:
    (tmp_path / "other.yaml").write_text(content, "utf-8")
    arguments = ["init", tmp_path / "my.yaml", "--accelerate", tmp_path / "other.yaml", "--yes"]
    with pytest.raises(SystemExit) as caught:
        main([*map(str, arguments)])
    assert (caught.value.code, (tmp_path / "my.yaml").exists()) == (1, False)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--recipe", "--accelerate"])
@pytest.mark.parametrize("content", [b"- a\n", b"{{: b", b"\xff\xfe"])
def test_what_cannot_be_read_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, content: bytes
) -> None:
    (tmp_path / "bad.yaml").write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        main(["init", str(tmp_path / "my.yaml"), option, str(tmp_path / "bad.yaml"), "--yes"])
    assert (caught.value.code, (tmp_path / "my.yaml").exists()) == (1, False)
    assert capsys.readouterr().err.startswith("error: ")


def test_a_recipe_in_toml_is_one_to_start_from(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("[run]\nsteps = 3\n", "utf-8")
    with pytest.raises(SystemExit) as caught:
        main(["init", f"{tmp_path}/my.yaml", "--recipe", f"{tmp_path}/my.toml", "--yes"])
    assert (caught.value.code, read_recipe(tmp_path / "my.yaml").run.steps) == (0, 3)


EXPECTED = {"nodes": 2, "nproc": 4, "address": "10.0.0.1", "port": 29500}


def test_what_is_known_is_offered() -> None:
    known = {"launch.nodes": 3, "sharding.precision.param_dtype": "bfloat16"}
    offered = {one.key: one.offered for one in questions(known, devices=8, address="10.0.0.2")}
    assert offered == {
        "launch.by": "torchrun",
        "launch.nodes": 3,
        "launch.nproc": 8,
        "launch.address": "10.0.0.2",
        "launch.port": 29500,
        "sharding.strategy": "full_shard",
        "sharding.precision": "bf16",
    }
