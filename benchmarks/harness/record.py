"""Tables in a Markdown file, kept equal to the reports from which they were made.

A line such as ``<!-- results/step-2-ranks.json -->`` names a report beside the file, and the block
after it is that report as its command prints it. A test makes the blocks anew and compares.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.harness.report import read

BLOCK = re.compile(r"^<!-- (\S+\.json) -->\n```text\n.*?^```$", re.MULTILINE | re.DOTALL)


def with_tables(text: str, folder: Path) -> str:
    """``text`` with each block as the report that stands above it says; paths from ``folder``."""

    def renewed(block: re.Match[str]) -> str:
        lines = "\n".join(read(folder / block[1]).lines())
        return f"<!-- {block[1]} -->\n```text\n{lines}\n```"

    return BLOCK.sub(renewed, text)
