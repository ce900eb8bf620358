"""Tables in a Markdown file, kept equal to the reports from which they were made.

A line such as ``<!-- results/step-2-ranks.json -->`` names a report beside the file; the block
after it is that report's table. What a reader sees and what was measured cannot drift apart,
because a test makes the tables anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.checkpoint import results as checkpoint_results
from benchmarks.checkpoint import table as checkpoint_table
from benchmarks.faults import results as fault_results
from benchmarks.faults import table as fault_table
from benchmarks.gpu import results as gpu_results
from benchmarks.gpu import table as gpu_table
from benchmarks.programs import results as program_results
from benchmarks.programs import table as program_table
from benchmarks.step import results, table

__all__ = ["told", "with_tables"]

BLOCK = re.compile(r"^<!-- (\S+\.json) -->\n```text\n.*?^```$", re.MULTILINE | re.DOTALL)


def told(path: Path) -> str:
    """A recorded report as its command prints it.

    Raises:
        ValueError: it is no report, or one of another schema.
    """
    if path.name.startswith("gpu"):
        return "\n".join(gpu_table.lines(gpu_results.read(path)))
    if path.name.startswith("faults"):
        return "\n".join(fault_table.lines(fault_results.read(path)))
    if path.name.startswith("checkpoint"):
        return "\n".join(checkpoint_table.lines(checkpoint_results.read(path)))
    if path.name.startswith("programs"):
        return "\n".join(program_table.lines(program_results.read(path)))
    return "\n".join(table.lines(results.read(path)))


def with_tables(text: str, folder: Path) -> str:
    """``text`` with each table as the report that stands above it says; paths from ``folder``."""

    def renewed(block: re.Match[str]) -> str:
        name = block.group(1)
        return f"<!-- {name} -->\n```text\n{told(folder / name)}\n```"

    return BLOCK.sub(renewed, text)
