"""Tables in a Markdown file, kept equal to the reports from which they were made.

A line such as ``<!-- results/step-2-ranks.json -->`` names a report beside the file, and the block
after it is that report's table. A test makes the tables anew and compares.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import reports
from benchmarks.harness.report import read
from benchmarks.programs import report as programs_report

BLOCK = re.compile(r"^<!-- (\S+\.json) -->\n```text\n.*?^```$", re.MULTILINE | re.DOTALL)
# a file's name → its report and its table
KINDS: dict[str, tuple[type[Any], Callable[[Any], list[str]]]] = {
    "programs": (programs_report.Report, programs_report.lines),
}


def table_of(path: Path) -> str:
    """A recorded report as its command prints it.

    Raises:
        ValueError: it is no report, or one of another schema.
    """
    if path.name.split(".")[0] not in KINDS:
        return "\n".join(read(path).lines())
    kind, lines = KINDS[re.split(r"\W", path.name)[0]]
    return "\n".join(lines(reports.read(kind, path)))


def with_tables(text: str, folder: Path) -> str:
    """``text`` with each table as the report that stands above it says; paths from ``folder``."""

    def renewed(block: re.Match[str]) -> str:
        name = block.group(1)
        return f"<!-- {name} -->\n```text\n{table_of(folder / name)}\n```"

    return BLOCK.sub(renewed, text)
