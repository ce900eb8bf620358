"""Where two checkpoints differ, in as few lines as say it."""

from __future__ import annotations

from math import inf

from shardwise.cli.format_difference import format_difference
from shardwise.convert.difference import ABSENT, Change, Difference, UnequalTensor


def unequal(name: str, largest: float = 0.5) -> UnequalTensor:
    return UnequalTensor("model", name, ("F32", "F32"), ((2, 2), (2, 2)), largest)


def lines(list_all: bool = False, **parts: object) -> list[str]:
    difference = Difference(**({"only": ({}, {})} | parts))  # type: ignore[arg-type]
    escape = format_difference(difference, ("a", "b"), list_all)
    assert escape[:3] == ["A  a", "B  b", ""]
    return escape[3:]


def test_equal_is_one_line() -> None:
    assert lines(equal=7) == ["7 tensors compared: equal; other files were not compared"]


def test_layers_that_differ_are_folded_and_the_worst_are_named() -> None:
    some = tuple(unequal(f"h.{n}.w", largest=n / 8) for n in range(8))
    assert [line.split() for line in lines(tensors=some)[2:]] == [
        ["model:", "not", "equal", "tensors", "A", "B"],
        ["─" * 51],
        ["h.{0…7}.w", "8", "[2,", "2]", "float32", "the", "same"],
        *(["max", "abs", "diff", "of", f"h.{n}.w", f"{n / 8:.3g}"] for n in (7, 6, 5, 4, 3)),
    ]
    assert "  max abs diff of h.0.w      0" in lines(True, tensors=some)


def test_shapes_and_dtypes_are_told() -> None:
    one = UnequalTensor("model", "w", ("F32", "BF16"), ((2, 3), (3, 2)), inf)
    row = lines(tensors=(one,))[-1].split()
    assert row == ["w", "1", "[2,", "3]", "float32", "[3,", "2]", "bfloat16"]


def test_names_that_only_one_has() -> None:
    only = ({"model": ["h.0.w", "h.1.w"]}, {"optimizer": ["step/w"]})
    assert lines(only=only)[1:] == [
        "",
        "only in A, model: 2 tensors",
        "  h.{0…1}.w",
        "",
        "only in B, optimizer: 1 tensor",
    ]
    assert lines(True, only=only)[-1] == "  step/w"


def test_fields_are_shown_up_to_twenty() -> None:
    fields = tuple(Change(f"scheduler.x{n}", n, ABSENT) for n in range(25))
    said = lines(training=fields)
    assert said[2] == "training state: 25 differ"
    assert said[3] == "  scheduler.x0: 0 in A, nothing in B"
    assert said[-1] == "  … and 5 more lines; --all shows them"
    assert len(lines(True, training=fields)) == 3 + 25
    assert lines(training=(Change("", ABSENT, {}),))[-1] == "  all of it: nothing in A, {} in B"


def test_equal_says_if_tensors_alone_were_compared() -> None:
    (line,) = lines(equal=1, only_tensors=True)
    alone = "equal; configuration, tokenizer and training were not compared"
    assert line == f"1 tensor compared: {alone}"


def test_a_name_of_nothing_is_shown() -> None:
    assert '  ""' in lines(only=({"model": [""]}, {}))
