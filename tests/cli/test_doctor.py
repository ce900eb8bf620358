"""``shardwise doctor`` as a user meets it: what it prints and writes, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli import doctor, main
from shardwise.config.strategies import STRATEGIES
from shardwise.doctor import steps
from shardwise.doctor.conformance import CHECKS, Result
from shardwise.doctor.machine import Package


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_what_is_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("--output", tmp_path / "here.json") == 0
    out = capsys.readouterr().out
    for start in ("torch ", "cpu     1 × ", "cuda    none", "hpu     PT_HPU_LAZY_MODE "):
        assert any(line.startswith(start) for line in out.splitlines()), start
    assert out.splitlines()[0].split() == ["package", "found", "needed", "newest", "tested"]
    assert out.endswith("here      ranks use cpu over gloo\n")
    written = json.loads((tmp_path / "here.json").read_text("utf-8"))
    assert set(written["devices"]) == {"cpu", "cuda", "xpu", "hpu"}


def test_a_package_that_is_too_old_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "packages", lambda: [Package("torch", "2.4.0", ">=2.11")])
    assert run() == 1
    assert capsys.readouterr().err.startswith("error: missing, or too old: torch.")


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ("RANK=1", "has RANK, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT: a launcher sets all"),
        ("RANK=1", "If it is the number of this machine, name it NODE_RANK"),
        ("WORLD_SIZE=2 RANK=1 MASTER_ADDR=::1 MASTER_PORT=9", "rank 1 of 2, which meet at ::1:9"),
        ("WORLD_SIZE=2 RANK=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=9", "meeting   no program listens"),
    ],
)
def test_the_variables_of_a_launcher_are_read_as_a_run_reads_them(
    variables: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (variable.split("=") for variable in variables.split()):
        monkeypatch.setenv(name, value)
    assert run() == ("not" in text or "If" in text)
    assert text in "".join(capsys.readouterr())


def test_a_node_rank_beyond_the_nodes_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        main(["doctor", "--nodes", "--nnodes=2", "--node-rank=5", "--master=10.0.0.2:29500"])
    assert "--node-rank 5 is none of 2 nodes (--nnodes)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [("--nnodes", "2"), ("--recipe", "demo"), ("--nodes", "--conformance")]
)
def test_an_option_that_would_change_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *arguments])
    assert caught.value.code == 2
    assert " of --nodes; " in capsys.readouterr().err


def test_conformance_prints_a_line_for_each_check_and_writes_a_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, few in {"LAYERS": 2, "WIDTH": 32, "WARM": 1, "STEPS": 2}.items():
        monkeypatch.setattr(steps, name, few)
    assert run("--conformance", "--device=cpu", "--nproc=1", "--output", tmp_path / "r.json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[6:26].strip() for line in lines if line.startswith("pass  ")] == list(CHECKS)
    assert "rank 0 → cpu" in lines
    assert f"{len(CHECKS)} of {len(CHECKS)} checks passed" in lines
    written = json.loads((tmp_path / "r.json").read_text("utf-8"))
    assert (written["passed"], written["device"], written["ranks"]) == (True, "cpu", ["cpu"])
    assert [check["name"] for check in written["checks"]] == list(CHECKS)
    assert [cost["strategy"] for cost in written["steps"]] == list(STRATEGIES)
    results = [line for line in lines if line[:4] in ("pass", "step")]
    assert all("expected " in line and "; found " in line for line in results)
    assert (tmp_path / "r.txt").read_text("utf-8").splitlines() == lines


def test_a_check_that_fails_is_named_and_the_status_is_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result = Result("all-gather", False, "every byte", "rank 0: wrong", seconds=0.1)
    monkeypatch.setattr(doctor, "CHECKS", {"all-gather": None})
    monkeypatch.setattr(doctor, "conform", lambda _: iter([result]))
    assert run("--conformance", "--device=cpu", "--nproc=1", "--output", tmp_path / "r.json") == 1
    out, err = capsys.readouterr()
    assert "FAIL  all-gather            expected every byte; found rank 0: wrong (0.1 s)" in out
    assert err.startswith("error: 1 of 1 checks did not pass: all-gather. Do not train")
    assert json.loads((tmp_path / "r.json").read_text("utf-8"))["passed"] is False
