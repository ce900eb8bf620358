"""Names as a terminal may show them: nothing that it obeys, and repeated layers as one line.

model.layers.0.mlp.up.weight  …  model.layers.31.mlp.up.weight
model.layers.{0…31}.mlp.up.weight
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ["Fold", "counted", "fold", "named", "shown", "shown_lines"]

_NUMBER = re.compile(r"(?<![^./])(0|[1-9][0-9]{0,8})(?![^.])")
DEEPEST = 16  # numbers in a name; one with more is shown as it is
MOST = 6  # ranges of numbers that are written out

Numbers = tuple[int, ...]
Box = tuple[Numbers, ...]
"""For each place of a number in a name, the numbers that occur there; every combination does."""


class Fold(NamedTuple):
    """Names that differ in nothing but numbers.

    Attributes:
        name: of all of them.
        times: how many they are.
        kind: what they have in common.
    """

    name: str
    times: int
    kind: Any


def shown(text: object) -> str:
    """``text`` with every character that a terminal would obey, or hide, written as an escape.

    Names in files are anybody's: one may clear the screen, or draw another name over itself.
    """
    return "".join(c if c.isprintable() else _escaped(c) for c in str(text))


def named(text: str) -> str:
    """A tensor's name; an empty one can be seen."""
    return shown(text) or '""'


def counted(count: int, word: str) -> str:
    """``"1 tensor"``, ``"1,000 tensors"``."""
    return f"{count:,} {word}{'s' * (count != 1)}"


def shown_lines(text: str) -> str:
    """The same for a text of several lines."""
    return "\n".join(map(shown, text.split("\n")))


def _escaped(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def fold(names: Iterable[tuple[str, Hashable]]) -> list[Fold]:
    """Names with what they are; those of one kind that differ in numbers alone are one."""
    families: dict[tuple[tuple[str, ...], Hashable], list[Numbers]] = {}
    for name, kind in names:
        parts = _NUMBER.split(name)
        parts = parts if len(parts) <= 2 * DEEPEST + 1 else [name]
        numbers = tuple(int(part) for part in parts[1::2])
        families.setdefault((tuple(parts[::2]), kind), []).append(numbers)
    return [
        Fold(_name(texts, box), _count(box), kind)
        for (texts, kind), numbers in families.items()
        for box in _boxes(numbers)
    ]


def _boxes(numbers: Sequence[Numbers]) -> list[Box]:
    """As few boxes as it takes to hold these and no others, cut by the first number first."""
    if not numbers[0]:
        return [()]
    rests: dict[int, list[Numbers]] = {}
    for first, *rest in numbers:
        rests.setdefault(first, []).append(tuple(rest))
    firsts: dict[tuple[Box, ...], list[int]] = {}
    for first, some in rests.items():
        firsts.setdefault(tuple(_boxes(some)), []).append(first)
    return [(tuple(some), *box) for boxes, some in firsts.items() for box in boxes]


def _name(texts: Sequence[str], box: Box) -> str:
    words = [texts[0]]
    for numbers, text in zip(box, texts[1:], strict=True):
        words += [_range(numbers), text]
    return "".join(words)


def _count(box: Box) -> int:
    count = 1
    for numbers in box:
        count *= len(numbers)
    return count


def _range(numbers: Numbers) -> str:
    """``(0, 1, 2, 5)`` → ``"{0…2,5}"``."""
    ordered = sorted(numbers)
    if len(ordered) == 1:
        return str(ordered[0])
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    if len(runs) > MOST:
        return f"{{{len(ordered)} of {ordered[0]}…{ordered[-1]}}}"
    return "{" + ",".join("…".join(map(str, run)) for run in runs) + "}"
