"""``shardwise bench``: measured beside planned, in a table, as JSON and as a picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.cli.bench import Bench, _rows
from shardwise.integrations.side_by_side import Measured
from shardwise.plan.forecast.candidate import Candidate
from shardwise.plan.forecast.planner import Planner
from tests.forked import forked

MODEL = """
import torch

def build():
    layers = [torch.nn.Linear(1024, 1024) for _ in range(4)]
    return torch.nn.Sequential(*layers), torch.zeros(2, 1024)
"""

HERE = """
[accelerators."here"]
bf16 = 1e11
fp32 = 1e11
products = 1.0
attention = 1.0
memory = 1e10
bandwidth = 1e10
inside = "PCIe 3"
between = "PCIe 3"
device = "cpu"
source = "made up"
"""


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.prove)])
@forked
def test_an_engine_is_measured_and_planned(nproc: int, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    picture, here = tmp_path / "bench.png", tmp_path / "here.toml"
    here.write_text(HERE)
    options = [
        f"--machines={here}",
        f"--nproc={nproc}",
        "--engine",
        "full_shard",
        "--rounds",
        "2",
        "--json",
        "--plot",
        str(picture),
    ]
    command = [
        sys.executable,
        "-m",
        "shardwise.cli",
        "bench",
        f"{tmp_path}/model.py:build",
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["engine"] == "full_shard"
    assert row["milliseconds"] > 0
    state = 4 * 4 * 4 * 1024 * 1025  # bytes of four layers, as AdamW has them
    assert row["planned_peak"] > state
    assert row["peak"] > 0.9 * state
    assert row["planned_milliseconds"] > 0
    three_passes = 12 / 11 * row["flops_per_second"]  # the first layer's input has no gradient
    assert row["mfu"] == pytest.approx(three_passes / 1e11)
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize("command", [["bench", "demo", "--plot"], ["doctor", "--output"]])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, str(tmp_path / "none" / "file")])
    printed = capsys.readouterr()
    assert (caught.value.code, printed.out) == (2, "")
    assert f"the folder {tmp_path / 'none'} does not exist" in printed.err


def test_a_picture_is_not_written_in_a_file_that_says_it_is_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "demo", "--plot", str(tmp_path / "x.svg")])
    assert caught.value.code == 2
    assert "it is drawn as PNG. Write" in capsys.readouterr().err


@forked
def test_what_every_rank_refuses_is_said_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardwise.cli", "bench", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("names no model") == 1
    assert not done.stdout


def test_a_plan_is_of_the_ranks_transport_and_of_processes(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    bench = Bench(f"{tmp_path}/model.py:build", 2, rounds=1, rows=2, seq=None, engines=())
    question = bench.question(2)
    measured = [
        Measured(name, 1.0, 0, shared) for name, shared in (("zero1", True), ("zero1", False))
    ]
    shared, messages = (row["planned_peak"] for row in _rows(question, bench, measured))
    assert shared < messages  # of full buckets each rank has its own
    tensors = Planner(question).forecast(Candidate("zero1", 2)).memory.peak
    assert messages > 2 * tensors  # a process keeps pages that it has had
