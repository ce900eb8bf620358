"""Prints the difference between two checkpoints: pure functions that return lines of text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from shardwise.checkpoint.save_plan import MODEL
from shardwise.cli.format_checkpoint import WIDTH, dtype_name, shorten
from shardwise.cli.format_names import escape, escape_name, plural
from shardwise.cli.tables import table
from shardwise.convert.difference import ABSENT, Change, Difference, UnequalTensor
from shardwise.units.names import group_names

__all__ = ["format_difference"]

MAX_LINES = 20  # lines of one kind
MAX_TENSORS = 5  # tensors whose difference is shown


def format_difference(
    difference: Difference, names: tuple[str, str], list_all: bool = False
) -> list[str]:
    """The difference between A and B; one line if they are equal."""
    lines = [f"A  {escape(names[0])}", f"B  {escape(names[1])}", ""]
    compared = f"{plural(difference.equal + len(difference.tensors), 'tensor')} compared"
    if difference.is_empty:
        rest = "configuration, tokenizer and training" if difference.only_tensors else "other files"
        return [*lines, f"{compared}: equal; {rest} were not compared"]
    lines.append(f"{compared}: {difference.equal:,} equal, {len(difference.tensors):,} not")
    for side, names_only in zip("AB", difference.only, strict=True):
        lines += _only(side, names_only, list_all)
    for kind in dict.fromkeys(tensor.kind for tensor in difference.tensors):
        lines += _unequal(
            kind, [tensor for tensor in difference.tensors if tensor.kind == kind], list_all
        )
    lines += _changes("training state", difference.training, list_all)
    return lines


def _only(side: str, only: Mapping[str, Sequence[str]], list_all: bool) -> list[str]:
    lines = []
    for kind, names in only.items():
        lines += ["", f"only in {side}, {escape(kind)}: {plural(len(names), 'tensor')}"]
        groups = (
            names
            if list_all
            else [group.name for group in group_names((name, ()) for name in names)]
        )
        lines += (
            _truncate([f"  {escape_name(name)}" for name in groups], list_all)
            if list_all or kind == MODEL
            else []
        )
    return lines


def _unequal(kind: str, tensors: Sequence[UnequalTensor], list_all: bool) -> list[str]:
    """A row for each group of repeated layers, then the tensors that differ most, or all."""
    kinds = [(first.name, (first.shapes, first.dtypes)) for first in tensors]
    rows = []
    for name, count, (shapes, dtypes) in group_names(kinds):
        first, second = (f"{list(s)} {dtype_name(d)}" for s, d in zip(shapes, dtypes, strict=True))
        rows.append(
            [
                f"  {escape_name(name)}",
                f"{count:,}",
                first,
                second if second != first else "the same",
            ]
        )
    head = [f"{escape(kind)}: not equal", "tensors", "A", "B"]
    lines = ["", *_truncate(table(rows, head), list_all)]
    comparable = [first for first in tensors if first.shapes[0] == first.shapes[1]]
    comparable.sort(key=lambda first: first.max_abs_diff, reverse=True)
    worst = comparable if list_all else comparable[:MAX_TENSORS]
    return lines + table(
        [[f"  max abs diff of {escape_name(t.name)}", f"{t.max_abs_diff:.3g}"] for t in worst]
    )


def _changes(title: str, changes: Sequence[Change], list_all: bool) -> list[str]:
    if not changes:
        return []
    lines = ["", f"{title}: {len(changes):,} differ"]
    rows = [
        f"  {escape(c.place or 'all of it')}: {_value(c.one)} in A, {_value(c.other)} in B"
        for c in changes
    ]
    return lines + _truncate(rows, list_all)


def _truncate(rows: Sequence[str], list_all: bool) -> list[str]:
    if list_all or len(rows) <= MAX_LINES:
        return list(rows)
    return [*rows[:MAX_LINES], f"  … and {len(rows) - MAX_LINES:,} more lines; --all shows them"]


def _value(value: object) -> str:
    return "nothing" if value is ABSENT else shorten(json.dumps(value), WIDTH // 3)
