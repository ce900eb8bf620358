"""``shardwise trace`` as a newcomer meets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.cli.trace import side_by_side


def trace(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main(["trace", *arguments])
    out, error = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out + error


def test_without_a_model_it_is_the_tutorials(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = trace(capsys, "--strategy", "shard_grad_op")
    assert code == 0
    assert "1. functional       torch traced the module: 6 operations" in text
    forward, backward = text.split("*" * 56)
    assert "gathering_0 = all_gather_impl(comm, shard_0, '0')" in forward
    assert "summed_0 = wait_impl(comm, reducing_0)" in backward


def test_a_stage_a_rank_of_many_and_a_model_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "def build():\n    return torch.nn.Linear(2048, 4, bias=False), torch.ones(2, 2048)\n"
        "def bare():\n    return torch.nn.Linear(2, 2)\n",
        "utf-8",
    )
    model = f"{tmp_path / 'net.py'}:build"
    code, text = trace(capsys, model, "--world", "1024", "--rank", "7", "--stage", "synchronize")
    assert code == 0
    assert "rank 7 of 1024" in text
    assert "# float32[16, 1]  this rank's part of weight" in text
    code, text = trace(capsys, f"{tmp_path / 'net.py'}:bare")
    assert (code, "returns no input" in text) == (1, True)
    code, text = trace(capsys, f"{tmp_path / 'net.py'}:biuld")
    assert (code, "nearest is build" in text) == (1, True)
    code, text = trace(capsys, "--stage", "sortwaits")
    assert (code, "nearest is 'sort waits'" in text) == (1, True)
    assert trace(capsys, "net")[0] == 1


REQUIRED = """from argparse import ArgumentParser
parser = ArgumentParser()
parser.add_argument("--data", required=True)
parser.parse_args()
"""


@pytest.mark.parametrize("name", ["net.py:Net", "net:Net"])
def test_a_model_may_import_its_neighbours_and_parse_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    stem = f"net_of_{name.count('.')}"  # what was imported stays imported
    (tmp_path / f"near_{stem}.py").write_text("import torch\nclass Base(torch.nn.Linear): pass\n")
    text = f"from near_{stem} import Base\nimport argparse, torch\nparser = "
    text += "argparse.ArgumentParser()\nparser.add_argument('--steps')\nparser.parse_args()\n"
    text += "def Net():\n    return Base(2, 2), torch.ones(2, 2)\n"
    (tmp_path / f"{stem}.py").write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["shardwise", "trace", "--world", "2"])
    code, text = trace(capsys, name.replace("net", stem))
    assert (code, "shard_0 = " in text or "gather" in text) == (0, True), text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (REQUIRED, "net.py:4: net.py: error: the following arguments are required: --data."),
        ("x = 1\nimport not_there\n", "net.py:2: No module named 'not_there'."),
    ],
)
def test_a_file_that_fails_is_a_sentence_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, sentence: str
) -> None:
    (tmp_path / "net.py").write_text(text, "utf-8")
    code, printed = trace(capsys, f"{tmp_path / 'net.py'}:Net")
    assert code == 1
    assert sentence in printed
    assert "usage:" not in printed
    assert "Traceback" not in printed


def test_a_grid_is_two_numbers_and_what_is_not_a_hybrid_ignores_it_in_a_comparison(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, text = trace(capsys, "--strategy", "hybrid_shard", "--mesh", "2", "3", "--rank", "5")
    assert code == 0
    assert "hybrid_shard (replicate=2 × shard=3), rank 5 of 6" in text
    assert "over replicate: sums 5.5 KiB, sends 5.5 KiB: the copies' sums, too" in text
    _, text = trace(capsys, "--strategy", "hybrid_shard", "--mesh", "3", "2")
    assert "over replicate: 8.2 KiB, sends 5.5 KiB: every rank needs the full mean" in text
    code, text = trace(capsys, "--diff", "hybrid_full", "full_shard", "--mesh", "2", "2")
    assert code == 0
    assert ["forward:", "update", "2", "0"] in [line.split() for line in text.splitlines()]
    code, text = trace(capsys, "--strategy", "full_shard", "--mesh", "2", "2")
    assert (code, "'full_shard' uses one axis, and the mesh has two" in text) == (1, True)


def test_two_strategies_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = trace(capsys, "--diff", "shard_grad_op", "full_shard")
    assert code == 0
    lines = [line.split() for line in text.splitlines()]
    assert ["forward:", "gather", "2", "2"] in lines
    assert ["backward:", "gather", "0", "1"] in lines
    only_right = [line.partition(">")[2].strip() for line in text.splitlines() if " > " in line]
    assert only_right[:2] == ["free(full_0)", "gathering_0 = all_gather(shard_0, '0')"]


def test_columns_show_what_differs_and_fold_what_does_not() -> None:
    same = [f"line {number}" for number in range(12)]
    rows = list(side_by_side([*same, "a", "only"], [*same, "b"]))
    assert rows[3] == "    … 6 lines are equal"
    assert [row.split() for row in rows[-2:]] == [["a", "|", "b"], ["only", "<"]]


def test_ranks_that_are_not_the_meshs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["trace", "--strategy", "hybrid_shard", "--mesh", "2", "2", "--world", "8"])
    assert "for 4 ranks, and there are 8" in capsys.readouterr().err


def test_two_strategies_take_neither_a_third_nor_a_stage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for option in (("--strategy", "zero1"), ("--stage", "functional")):
        with pytest.raises(SystemExit):
            main(["trace", "--diff", "full_shard", "zero1", *option])
        assert f"{option[0]} and --diff exclude each other" in capsys.readouterr().err
