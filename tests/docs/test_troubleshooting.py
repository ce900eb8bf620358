"""The words that ``docs/troubleshooting.md`` quotes are those of the errors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"


def texts(source: str) -> Iterator[str]:
    """Every text of a program; what an f-string fills in is ``…``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_each_quoted_error_is_one_of_the_source() -> None:
    paths = (ROOT / "src" / "shardwise").rglob("*.py")
    known = "\n".join(text for path in paths for text in texts(path.read_text("utf-8")))
    quoted = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(quoted) > 25
    assert [words for words in quoted if words not in known] == []
