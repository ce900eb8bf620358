"""Mutants: what is changed, which tests are asked, and a run over a project of one function."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.mutants import run as mutants_run
from benchmarks.mutants.changes import Mutant, changes, mutants_of, mutated
from benchmarks.mutants.run import FOLDERS, ROOT, Config, Outcome, report_of, run, sources, stages

CODE = """
__all__ = ["f"]
if TYPE_CHECKING:
    SIZE = 3
def f(x: int = 2) -> int:
    assert x == 1
    log.info("x is", 3)
    x.y = 3
    print(f"{x + 1}", strict=True)
    if not x and x < 4:
        return x
    if x:
        raise ValueError(7)
    return False
"""
CHANGES = [
    (5, "2 → 3"),
    (8, "x.y = 3 → pass"),
    (8, "3 → 4"),
    (9, "print(f'{x + 1}', strict=True) → pass"),
    (10, "And → Or"),
    (10, "not x → x"),
    (10, "Lt → LtE"),
    (10, "4 → 5"),
    (11, "return x → return None"),
    (13, "raise ValueError(7) → pass"),
    (14, "False → True"),
]


def test_each_kind_of_change_is_made_and_nothing_else() -> None:
    assert [(line, change) for line, change, _ in changes(ast.parse(CODE))] == CHANGES


def test_a_mutant_differs_from_its_file_by_its_change_alone() -> None:
    (mutant,) = (each for each in mutants_of("a.py", CODE) if each.change == "And → Or")
    before, after = ast.unparse(ast.parse(CODE)), mutated(mutant, CODE).strip()
    assert after == before.replace("not x and", "not x or")


def test_a_file_is_tested_by_its_mirror_then_by_its_folder_and_by_processes_last() -> None:
    assert "src/shardwise/comm/watchdog/desync.py" in sources(ROOT, "comm")
    first, others, processes = stages(ROOT, "comm", "src/shardwise/comm/watchdog/desync.py")
    assert first == (["tests/comm/watchdog/test_desync.py"], "not spawn")
    assert "tests/comm/watchdog/test_watchdog.py" in others[0]
    assert processes == (first[0] + others[0], "spawn")


def test_every_folder_has_code_and_tests() -> None:
    for folder in FOLDERS:
        files = sources(ROOT, folder)
        assert files, folder
        assert all(stages(ROOT, folder, file) for file in files)


@pytest.mark.prove
def test_mutants_are_killed_where_a_test_fails_or_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of one function with one test, which does not notice one of its three mutants."""
    code = "def f(x):\n    print(x)\n    while not x:\n        pass\n    return x\n"
    monkeypatch.setattr(mutants_run, "ROOT", tmp_path)
    monkeypatch.setattr(mutants_run, "TEST_LIMIT", 0.5)
    for path, text in {
        "src/shardwise/__init__.py": "",
        "src/shardwise/a/b.py": code,
        "tests/a/test_b.py": "from shardwise.a.b import f\ndef test_f():\n    assert f(1) == 1\n",
        "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["spawn"]\n',
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    *_, report = run(Config(("a",), sample=10, jobs=1), lambda _: None)
    assert report.tables[0].rows == (
        ("src/shardwise/a/b.py", 3, 2, 2 / 3),
        ("a, all", 3, 2, 2 / 3),
        ("all", 3, 2, 2 / 3),
    )
    assert report.notes == ("survived: src/shardwise/a/b.py:2: print(x) → pass",)


def test_the_table_counts_each_file_and_each_folder() -> None:
    mutants = [Mutant("a.py", 3, f"{n} → 9", n) for n in range(4)]
    outcomes = [Outcome("comm", each, each.index > 0, 30.0) for each in mutants]
    lines = report_of(outcomes, Config()).lines()
    assert "a.py             4       3    75%" in lines
    assert "comm, all        4       3    75%" in lines
    assert lines[-1] == "survived: a.py:3: 0 → 9"
