"""The defects of published FSDP programs, found in a file: each with its line and a one-line fix.

``defects.toml`` has a row for each: what it looks like, the fact and the fix. The few that need a
calculation are functions in ``checks``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from shardwise.dialects.lint.checks import CHECKS
from shardwise.dialects.lint.source import Hit, Source

__all__ = ["DEFECTS", "Finding", "lint"]

DEFECTS: dict[str, dict[str, str]] = tomllib.loads(
    files("shardwise.dialects.lint").joinpath("defects.toml").read_text("utf-8")
)


class Finding(NamedTuple):
    """One defect of a file: its line, its number, the fact, and what to write instead."""

    line: int
    defect: str
    fact: str
    fix: str


def lint(path: Path) -> list[Finding]:
    """The defects of a configuration, a command line or a program, by line. Runs nothing.

    Raises:
        ConfigError: the file cannot be read or parsed.
    """
    source = Source.read(path)
    hits = {hit for check in (_patterns, *CHECKS) for hit in check(source)}
    findings = [
        Finding(
            hit.line,
            hit.defect.partition("-")[0],
            DEFECTS[hit.defect]["fact"].format(*hit.names),
            DEFECTS[hit.defect]["fix"].format(*hit.names),
        )
        for hit in hits
    ]
    return sorted(set(findings), key=lambda f: (f.line, int(f.defect[1:]), f.fact))


def _patterns(source: Source) -> Iterator[Hit]:
    for defect, row in DEFECTS.items():
        for line, text in source.lines if "match" in row else ():
            for match in re.finditer(row["match"], text):
                names = tuple(group for group in match.groups() if group)
                if _holds(row, source.text, names):
                    yield Hit(defect, line, names)


def _holds(row: dict[str, str], text: str, names: tuple[str, ...]) -> bool:
    """Do ``when`` and ``unless`` of a row let it count?"""
    when, unless = (re.sub(r"\{0\}", names[0] if names else "", row.get(k, "")) for k in _KEYS)
    if not re.search(when, text, re.MULTILINE):
        return False
    return not (unless and re.search(unless, text, re.MULTILINE))


_KEYS = ("when", "unless")
