"""The quickstart's program runs as it stands, and its other blocks use the names that it has."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path

import pytest

from tests.examples.run import torchrun

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"
PROGRAM: str
PROGRAM, *BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


def names(source: str, kind: type[ast.expr_context]) -> set[str]:
    """The names that are read, or given values, by imports and definitions, too."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, kind)}
    if kind is ast.Store:
        names |= {n.name for n in nodes if isinstance(n, ast.ClassDef | ast.FunctionDef)}
        aliases = [n for n in nodes if isinstance(n, ast.alias)]
        names |= {(n.asname or n.name).partition(".")[0] for n in aliases}
    return names


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_use_names_of_the_program(block: str) -> None:
    known = names(PROGRAM, ast.Store) | names(block, ast.Store) | set(vars(builtins))
    assert names(block, ast.Load) - known == set()


def with_steps(count: int) -> str:
    assert "STEPS = 16, 64, 200" in PROGRAM
    return PROGRAM.replace("STEPS = 16, 64, 200", f"STEPS = 16, 64, {count}")


def test_the_program_trains_validates_saves_resumes_and_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = []
    for steps in (100, 200):
        exec(compile(with_steps(steps), "train.py", "exec"), {"__name__": "__main__"})
        printed.append(capsys.readouterr().out)
    assert [text.partition(":")[0] for text in printed] == ["step 100", "step 200"]
    losses = [float(text.partition("loss ")[2].split()[0]) for text in printed]
    assert max(losses) < 4.5  # of 256 bytes alike it would be log(256) = 5.5
    assert all("\ndef forward(self" in text for text in printed)
    assert (tmp_path / "run" / "latest").resolve().name == "step-200"


@pytest.mark.prove
def test_the_program_goes_on_at_two_ranks(tmp_path: Path) -> None:
    for steps in (100, 200):
        (tmp_path / "train.py").write_text(with_steps(steps), "utf-8")
        [first_rank, _] = torchrun("train.py", folder=tmp_path)
        lines = [line.partition(":")[0] for line in first_rank if line.startswith("step ")]
        assert lines == [f"step {steps}"]
        assert any(line.startswith("def forward(self") for line in first_rank)
