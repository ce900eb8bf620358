"""Tables as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MIB = 2**20


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell: the first to the left, the others to the right."""
    table = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def cell(number: float | None, spec: str) -> str:
    """``number`` by a format such as ``".2f"``; a dash where it was not measured."""
    return "–" if number is None else format(number, spec)
