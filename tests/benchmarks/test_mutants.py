"""Mutants: what is changed, which tests are asked, and a small run of its own kind."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks import mutants
from benchmarks.harness.machine import this_machine
from benchmarks.mutants import Mutant, Outcome, Report, changes

CODE = """
__all__ = ["f"]
def f(x: int = 2) -> int:
    assert x == 1
    x.y = 3
    print(x)
    if not x and x < 4:
        return x
    return None
"""


def test_each_kind_of_change_is_made_and_nothing_else() -> None:
    assert [(line, change) for line, change, _ in changes(ast.parse(CODE))] == [
        (3, "2 → 3"),
        (5, "x.y = 3 → pass"),
        (5, "3 → 4"),
        (6, "print(x) → pass"),
        (7, "And → Or"),
        (7, "not x → x"),
        (7, "Lt → LtE"),
        (7, "4 → 5"),
        (8, "return x → return None"),
    ]


def test_a_mutant_differs_from_its_file_by_its_change_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(CODE)
    (mutant,) = (mutant for mutant in mutants.mutants_of("a.py") if mutant.change == "And → Or")
    before, after = ast.unparse(ast.parse(CODE)), mutants.mutated(mutant).strip()
    assert after == before.replace("not x and", "not x or")


def test_a_file_is_tested_by_its_mirror_and_by_what_names_it() -> None:
    (file,) = (file for file in mutants.files_of(["comm"]) if file.endswith("/desync.py"))
    tests = mutants.tests_of(file)
    assert tests[0] == "tests/comm/test_desync.py"
    assert "tests/comm/test_watchdog.py" in tests


@pytest.mark.spawn
def test_mutants_are_killed_where_a_test_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of one function with one test, which does not notice one of its two mutants."""
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    for path, text in {
        "src/shardwise/__init__.py": "",
        "src/shardwise/a.py": "def f(x):\n    print(x)\n    return x\n",
        "tests/test_a.py": "from shardwise.a import f\ndef test_f():\n    assert f(1) == 1\n",
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["src"]\n',
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    report = mutants.run(["a"], 10, 0, 2, lambda _: None)
    assert {each.mutant.change: each.killed for each in report.outcomes} == {
        "print(x) → pass": False,
        "return x → return None": True,
    }


def test_the_table_counts_each_file_and_names_what_survived() -> None:
    outcomes = [Outcome(Mutant("a.py", 3, f"{n} → 9", n), n > 0, 1.0) for n in range(4)]
    lines = mutants.lines(Report(this_machine(), 0, tuple(outcomes)))
    assert "a.py        4       3    75%" in lines
    assert lines[-1] == "survived: a.py:3: 0 → 9"
