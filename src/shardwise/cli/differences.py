"""Two checkpoints side by side as a person reads them: pure functions to lines of text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from shardwise.checkpoint.save_plan import MODEL
from shardwise.cli.catalogues import WIDTH, dtype_name, short
from shardwise.cli.folded import counted, fold, named, shown
from shardwise.cli.tables import table
from shardwise.convert.difference import ABSENT, Change, Difference, UnequalTensor

__all__ = ["difference_lines"]

MOST = 20  # lines of one kind
WORST = 5  # tensors whose difference is shown


def difference_lines(
    difference: Difference, names: tuple[str, str], every: bool = False
) -> list[str]:
    """What differs between A and B; one line if nothing does."""
    lines = [f"A  {shown(names[0])}", f"B  {shown(names[1])}", ""]
    compared = f"{counted(difference.equal + len(difference.tensors), 'tensor')} compared"
    if difference.is_empty:
        alone = (
            "; configuration, tokenizer and training were not compared" * difference.only_tensors
        )
        return [*lines, f"{compared}: equal{alone}"]
    lines.append(f"{compared}: {difference.equal:,} equal, {len(difference.tensors):,} not")
    for side, only in zip("AB", difference.only, strict=True):
        lines += _only(side, only, every)
    for kind in dict.fromkeys(one.kind for one in difference.tensors):
        lines += _unequal(kind, [one for one in difference.tensors if one.kind == kind], every)
    lines += _changes("tied names", difference.ties, every)
    lines += _changes("training state", difference.training, every)
    lines += _changes("files", difference.files, every)
    return lines


def _only(side: str, only: Mapping[str, Sequence[str]], every: bool) -> list[str]:
    lines = []
    for kind, names in only.items():
        lines += ["", f"only in {side}, {shown(kind)}: {counted(len(names), 'tensor')}"]
        folded = names if every else [one.name for one in fold((name, ()) for name in names)]
        lines += (
            _first([f"  {named(name)}" for name in folded], every) if every or kind == MODEL else []
        )
    return lines


def _unequal(kind: str, tensors: Sequence[UnequalTensor], every: bool) -> list[str]:
    """Repeated layers are one row; below are the tensors that differ most, or all of them."""
    kinds = [(one.name, (one.shapes, one.dtypes)) for one in tensors]
    rows = []
    for name, times, (shapes, dtypes) in fold(kinds):
        one, other = (f"{list(s)} {dtype_name(d)}" for s, d in zip(shapes, dtypes, strict=True))
        rows.append([f"  {named(name)}", f"{times:,}", one, other if other != one else "the same"])
    head = [f"{shown(kind)}: not equal", "tensors", "A", "B"]
    lines = ["", *_first(table(rows, head), every)]
    comparable = [one for one in tensors if one.shapes[0] == one.shapes[1]]
    comparable.sort(key=lambda one: one.max_abs_diff, reverse=True)
    worst = comparable if every else comparable[:WORST]
    return lines + table(
        [[f"  max abs diff of {named(t.name)}", f"{t.max_abs_diff:.3g}"] for t in worst]
    )


def _changes(title: str, changes: Sequence[Change], every: bool) -> list[str]:
    if not changes:
        return []
    lines = ["", f"{title}: {len(changes):,} differ"]
    rows = [
        f"  {shown(c.place or 'all of it')}: {_value(c.one)} in A, {_value(c.other)} in B"
        for c in changes
    ]
    return lines + _first(rows, every)


def _first(rows: Sequence[str], every: bool) -> list[str]:
    if every or len(rows) <= MOST:
        return list(rows)
    return [*rows[:MOST], f"  … and {len(rows) - MOST:,} more lines; --all shows them"]


def _value(value: object) -> str:
    return "nothing" if value is ABSENT else short(json.dumps(value), WIDTH // 3)
