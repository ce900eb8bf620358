"""Two checkpoints side by side as a person reads them: pure functions to lines of text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.checkpoint.contents import MODEL
from shardwise.cli.catalogues import WIDTH, dtype_name, short
from shardwise.cli.folded import counted, fold, named, shown
from shardwise.convert.difference import ABSENT, Change, Difference, Unlike
from shardwise.listing import size

__all__ = ["difference_lines"]

MOST = 20  # lines of one kind


def difference_lines(found: Difference, names: tuple[str, str], every: bool = False) -> list[str]:
    """What differs between A and B; one line if nothing does."""
    known = found.nbytes - found.read
    how = f", {size(known)} of them by their checksums alone" if known else ""
    lines = [f"A  {shown(names[0])}", f"B  {shown(names[1])}", ""]
    tensors = counted(found.alike + len(found.tensors), "tensor")
    compared = f"{tensors}, {size(found.nbytes)}, compared{how}"
    if found.is_empty:
        alone = "; configuration, tokenizer and training were not compared" * found.tensors_alone
        return [*lines, f"{compared}: equal{alone}"]
    lines.append(f"{compared}: {found.alike:,} equal, {len(found.tensors):,} not")
    for side, only in zip("AB", found.only, strict=True):
        lines += _only(side, only, every)
    lines += _unlike(found.tensors, every)
    lines += _changes("tied names", found.ties, every)
    lines += _changes("training state", found.fields, every)
    lines += _changes("files", found.files, every)
    return lines


def _only(side: str, only: Mapping[str, Sequence[str]], every: bool) -> list[str]:
    lines = []
    for stem, names in only.items():
        lines += ["", f"only in {side}, {shown(stem)}: {counted(len(names), 'tensor')}"]
        rows = [f"  {named(name)}" for name, _, _ in _folded(((n, ()) for n in names), every)]
        lines += _first(rows, every) if every or stem == MODEL else []
    return lines


def _folded(names: Any, every: bool) -> list[Any]:
    return [(name, 1, kind) for name, kind in names] if every else fold(names)


def _unlike(tensors: Sequence[Unlike], every: bool) -> list[str]:
    lines: list[str] = []
    for stem in dict.fromkeys(one.stem for one in tensors):
        some = {one.name: one for one in tensors if one.stem == stem}
        lines += ["", f"{shown(stem)}: not equal"]
        cut = {name: one for name, one in some.items() if one.shapes[0] != one.shapes[1]}
        kinds = ((name, (one.shapes, one.dtypes)) for name, one in some.items())
        rows = []
        for name, count, (shapes, dtypes) in _folded(kinds, every):
            times = f"  {count:,} tensors" if count > 1 else ""
            rows.append(f"  {named(name)}{times}{_forms(shapes, dtypes)}")
        lines += _first(rows, every)
        rest = [one for name, one in some.items() if name not in cut]
        if rest:
            lines.append(_values(rest))
            lines += [f"    {_one(one)}" for one in (rest if every else _worst(rest))]
    return lines


def _forms(shapes: Any, dtypes: Any) -> str:
    text = ""
    if shapes[0] != shapes[1]:
        text += f"  {list(shapes[0])} in A, {list(shapes[1])} in B"
    if dtypes[0] != dtypes[1]:
        text += f"  {dtype_name(dtypes[0])} in A, {dtype_name(dtypes[1])} in B"
    return text


def _values(some: Sequence[Unlike]) -> str:
    differing, numel = sum(one.differing for one in some), sum(one.numel for one in some)
    largest = max(one.largest for one in some)
    relative = max(one.relative for one in some)
    return (
        f"  {differing:,} of {numel:,} elements differ, max abs diff {largest:.3g}, "
        f"max rel diff {relative:.3g}; most in"
    )


def _worst(some: Sequence[Unlike], most: int = 5) -> list[Unlike]:
    return sorted(some, key=lambda one: one.largest, reverse=True)[:most]


def _one(one: Unlike) -> str:
    return (
        f"{named(one.name)}: {one.differing:,} of {one.numel:,}, max abs diff {one.largest:.3g}, "
        f"max rel diff {one.relative:.3g}"
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
