"""What all benchmarks share: rounds, report files, pictures, and the recorded tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import benchmarks
from benchmarks.harness import report as reports
from benchmarks.harness.command import command, setting
from benchmarks.harness.machine import this_machine
from benchmarks.harness.plots import draw
from benchmarks.harness.report import Column, Report, Row, Table, with_tables
from benchmarks.harness.rounds import interleaved, paired, rotated, slowest

FOLDER = Path(benchmarks.__file__ or "").parent
RESULTS = (FOLDER / "RESULTS.md").read_text()
MACHINE = this_machine()
COLUMNS = (
    Column("engine"),
    Column("×", ".2f", drawn=True, target=0.9),
    Column("ms", ".1f"),
    Column("unmeasured"),
)
ROWS: dict[str, Row] = {"ours": {"×": 1.5, "ms": 123.0}, "theirs": {"×": None, "ms": 4.0}}
REPORT = Report(
    MACHINE, ("AdamW",), (Table.of("a title", COLUMNS, ROWS, ["absent: x"]),), ("× of y",)
)


def test_everybody_is_first_once_and_then_the_order_turns_round() -> None:
    orders = ["".join(rotated(list("abc"), number)) for number in range(6)]
    assert orders == ["abc", "bca", "cab", "cba", "acb", "bac"]
    assert paired([2.0, 6.0, 4.0], [1.0, 4.0, 2.0]) == (1.75, 2.0, 2.0)
    assert slowest([[1, 4], [2, 3]], float) == [2, 4]


def test_each_name_has_a_lap_in_each_round() -> None:
    order = list[str]()

    def lap(name: str, number: int) -> int:
        order.append(name)
        return number

    assert interleaved("ab", 2, lap) == {"a": [0, 1], "b": [0, 1]}
    assert order == ["a", "b", "b", "a"]


def test_a_table_shows_what_was_measured() -> None:
    text = "\n".join(REPORT.lines()[1:])
    assert text == (
        "AdamW\n\na title\n"
        "engine     ×     ms\nours    1.50  123.0\ntheirs     –    4.0\nabsent: x\n\n× of y"
    )


@dataclass(frozen=True)
class Config:
    """What the command below takes."""

    world: tuple[int, ...] = setting((2,), "ranks")
    engines: tuple[str, ...] = setting(("a", "b"), "which", ("a", "b"))
    rounds: int = setting(20, "rounds", least=2)
    quick: bool = setting(default=False, text="quick")
    kind: str = setting("x", "kind", ("x", "y"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], Config()),
        (
            ["--world", "2,4", "--engines", "b", "--rounds", "3", "--quick", "--kind", "y"],
            Config((2, 4), ("b",), 3, quick=True, kind="y"),
        ),
        (["--engines", "a,c"], "'c' is not one of 'a', 'b'"),
        (["--world", "two"], "'two' is not a valid integer"),
        (["--rounds", "1"], "1 is not in the range x>=2"),
    ],
)
def test_a_command_takes_the_settings_of_its_benchmark(
    arguments: list[str], expected: Config | str, tmp_path: Path
) -> None:
    configs, path, picture = list[Config](), tmp_path / "a.json", tmp_path / "a.png"

    def run(config: Config, _: Any) -> Iterator[Report]:
        configs.append(config)
        yield REPORT
        assert reports.read(path) == REPORT  # kept whenever there is more
        yield replace(REPORT, failures=1)

    outputs = ["--json", str(path), "--plot", str(picture)]
    result = CliRunner().invoke(command("one", Config, run), [*arguments, *outputs])
    if isinstance(expected, str):
        assert expected in result.output
        return
    assert configs == [expected]
    assert "\n".join(REPORT.lines()) in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert result.exit_code == 1


# ---- files ---------------------------------------------------------------------------------


def test_a_report_survives_its_file_and_a_foreign_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    reports.write(REPORT, path)
    assert reports.read(path) == REPORT
    good = json.loads(path.read_text("utf-8"))
    without = {key: value for key, value in good.items() if key != "machine"}
    for bad in (good | {"colour": "red"}, good | {"failures": "one"}, without):
        path.write_text(json.dumps(bad), "utf-8")
        with pytest.raises(ValueError, match=r"fields that|validation error"):
            reports.read(path)


def test_without_a_column_to_draw_there_is_no_picture(tmp_path: Path) -> None:
    draw(replace(REPORT, tables=()), tmp_path / "empty.png")
    assert not (tmp_path / "empty.png").exists()


# ---- recorded tables -----------------------------------------------------------------------


def test_results_are_what_was_recorded() -> None:
    """Otherwise run ``python -m benchmarks record``."""
    assert with_tables(RESULTS, FOLDER) == RESULTS


def test_every_recorded_report_has_its_table() -> None:
    named = set(re.findall(r"<!-- (\S+\.json)(?:: .*)? -->", RESULTS))
    assert named == {f"results/{path.name}" for path in (FOLDER / "results").glob("*.json")}


def test_a_table_is_renewed_and_what_is_around_it_stays(tmp_path: Path) -> None:
    reports.write(REPORT, tmp_path / "a.json")
    text = "before\n<!-- a.json -->\n```text\nold\n```\nafter\n```text\nmine\n```\n"
    renewed = with_tables(text, tmp_path)
    assert renewed.startswith("before\n<!-- a.json -->\n```text\n")
    assert renewed.endswith("\n```\nafter\n```text\nmine\n```\n")
    assert "old" not in renewed
    assert "123" in renewed
    assert with_tables(renewed, tmp_path) == renewed


@pytest.mark.parametrize(
    ("parts", "with_table", "with_notes"),
    [
        ("head", False, False),
        ("tables", True, False),
        ("notes", False, True),
        (f"notes; {REPORT.tables[0].title[:3]}", True, True),
    ],
)
def test_a_part_of_a_report_is_shown(
    tmp_path: Path, parts: str, *, with_table: bool, with_notes: bool
) -> None:
    reports.write(REPORT, tmp_path / "a.json")
    text = with_tables(f"<!-- a.json: {parts} -->\n```text\n```\n", tmp_path)
    assert text.startswith(f"<!-- a.json: {parts} -->\n```text\n{REPORT.machine}\n")
    assert ("\n".join(REPORT.tables[0].lines()) in text) == with_table
    assert ("\n".join(REPORT.notes) in text) == with_notes
    with pytest.raises(ValueError, match="no table's title begins with 'tale'"):
        with_tables("<!-- a.json: tale -->\n```text\n```\n", tmp_path)
