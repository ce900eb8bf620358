"""Cells of a row of published results: numbers as people write them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

Row = Mapping[str, str]
UNSAID = ("", "none", "no", "false", "0", "off", "n", "-", "n/a")
_NUMBER = re.compile(
    r"(?:tp|pp|cp|ep)?[~≈>≥= ]*(\d[\d,]*\.?\d*(?:e\d+)?) ?(k|ms)?(?![\d.]| ?[-–x×*] ?\d| ?m\b)",
    re.IGNORECASE,
)


def stripped(cells: Mapping[str, Any]) -> defaultdict[str, str]:
    """The cells of a row; a column that a file lacks is an empty cell."""
    texts = {name: value.strip() for name, value in cells.items() if isinstance(value, str)}
    return defaultdict(str, texts)


def number(row: Row, name: str) -> float | None:
    """A number above 0, such as ``8,192``, ``~40 GiB``, ``1.2k`` or ``900 ms``; no range is one.

    ``k`` is 1024 of a sequence's length, and else 1000.
    """
    read = _NUMBER.match(row[name])
    if read is None:
        return None
    units = {"k": 1024 if name == "seq_len" else 1000, "ms": 1e-3}
    value = float(read[1].replace(",", "")) * units.get((read[2] or "").lower(), 1)
    return value if value > 0 else None
