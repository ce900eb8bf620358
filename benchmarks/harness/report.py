"""What a benchmark measured: tables, and the machine. One form for every benchmark.

The same value is printed, drawn, kept as a JSON file and copied into RESULTS.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.harness.machine import Machine

MIB = 2**20
Cell = str | int | float | None
"""``None`` where something was not measured."""
Row = dict[str, Cell]
"""Column → number."""
PARTS = ("head", "tables", "notes")
# In a Markdown file: a report's name, its parts if not all are shown, and what its command prints.
BLOCK = re.compile(
    r"^<!-- (\S+\.json)(?:: ([^\n]+))? -->\n```text\n.*?^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Column:
    """What one column of a table shows."""

    name: str
    spec: str = ""  # the format of its numbers, such as ``".2f"``
    drawn: bool = False  # in a picture of the report
    target: float | None = None  # the most that it should be

    def text(self, cell: Cell) -> str:
        """A cell as it is printed; a dash where nothing was measured."""
        if cell is None:
            return "–"
        return cell if isinstance(cell, str) else format(cell, self.spec)


@dataclass(frozen=True)
class Table:
    """Rows under one title."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]  # each as long as ``columns``
    remarks: tuple[str, ...] = ()  # lines below the rows

    @classmethod
    def of(
        cls,
        title: str,
        columns: Sequence[Column],
        rows: Mapping[str, Mapping[str, Cell]],
        remarks: Iterable[str] = (),
    ) -> Table:
        """A row for each name, which is its first cell; without columns that nobody measured."""
        first, *others = columns
        present = [c for c in others if any(row.get(c.name) is not None for row in rows.values())]
        cells = tuple((name, *(row.get(c.name) for c in present)) for name, row in rows.items())
        return cls(title, (first, *present), cells, tuple(remarks))

    def lines(self) -> list[str]:
        """The table as plain text: the first column to the left, the others to the right."""
        heads = [column.name for column in self.columns]
        cells = [[c.text(v) for c, v in zip(self.columns, r, strict=True)] for r in self.rows]
        widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
        lines = [
            "  ".join([r[0].ljust(widths[0]), *map(str.rjust, r[1:], widths[1:])]).rstrip()
            for r in ([heads, *cells] if cells else [])
        ]
        return [*([self.title] if self.title else []), *lines, *self.remarks]


@dataclass(frozen=True)
class Report:
    """One run."""

    machine: Machine  # where
    settings: tuple[str, ...] = ()  # what was run, in lines
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()  # what the columns mean, and what follows from the numbers
    failures: int = 0  # what was not as it must be, whatever the numbers

    def part(self, names: Sequence[str]) -> Report:
        """The ``head`` alone, ``tables``, ``notes``, or tables whose titles begin with a name.

        Raises:
            ValueError: no title begins with a name.
        """
        begins = [name for name in names if name not in PARTS]
        for name in begins:
            if not any(table.title.startswith(name) for table in self.tables):
                raise ValueError(f"no table's title begins with {name!r}")
        shown = self.tables if "tables" in names else ()
        shown = shown or tuple(t for t in self.tables if t.title.startswith(tuple(begins)))
        return replace(self, tables=shown, notes=self.notes if "notes" in names else ())

    def lines(self) -> list[str]:
        """The report as plain text."""
        text = [str(self.machine), *self.settings]
        for table in self.tables:
            text += ["", *table.lines()]
        return [*text, "", *self.notes] if self.notes else text


def verdict(name: str, row: Mapping[str, Cell], columns: Iterable[Column]) -> str:
    """What a row missed of its columns' targets; a number that is missing reaches nothing."""
    missed = [
        f"{column.name} {column.text(cell)}, at most {column.text(column.target)} wanted"
        for column in columns
        if column.target is not None
        and (not isinstance(cell := row.get(column.name), int | float) or cell > column.target)
    ]
    return f"{name}: {'; '.join(missed) or 'all targets reached'}"


def write(report: Report, path: Path) -> None:
    """Write a report as JSON, each row of a table in a line of its own."""
    text = TypeAdapter(Report).dump_json(report, indent=1).decode()
    text = re.sub(r"\[\s+[^][{}]*\]", lambda row: re.sub(r"\s*\n\s*", " ", row[0]), text)
    path.write_text(text + "\n", "utf-8")


def read(path: Path) -> Report:
    """Read a report.

    Raises:
        ValueError: a field is missing, unknown, or of another type.
    """
    text, adapter = path.read_bytes(), TypeAdapter(Report)
    report = adapter.validate_json(text, strict=True)
    if adapter.dump_python(report, mode="json") != json.loads(text):
        raise ValueError(f"{path} has fields that a report has not")
    return report


def with_tables(text: str, folder: Path) -> str:
    """``text`` with each ``BLOCK`` as the report says that it names; paths from ``folder``."""

    def renewed(block: re.Match[str]) -> str:
        report = read(folder / block[1])
        shown = report.part(block[2].split("; ")) if block[2] else report
        head = block[0].partition("\n")[0]
        return "\n".join([head, "```text", *shown.lines(), "```"])

    return BLOCK.sub(renewed, text)
