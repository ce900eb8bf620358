"""Where two checkpoints differ, in as few lines as say it."""

from __future__ import annotations

from math import inf

from shardwise.cli.differences import difference_lines
from shardwise.convert.difference import ABSENT, Change, Difference, Unlike


def unlike(name: str, differing: int = 3, largest: float = 0.5) -> Unlike:
    return Unlike("model", name, ("F32", "F32"), ((2, 2), (2, 2)), 4, differing, largest, 0.25)


def lines(every: bool = False, **parts: object) -> list[str]:
    fields: dict[str, object] = {"only": ({}, {}), "tensors": (), "alike": 0, "fields": ()}
    fields |= {"files": (), "read": 0, "nbytes": 0}
    found = Difference(**(fields | parts))  # type: ignore[arg-type]
    said = difference_lines(found, ("a", "b"), every)
    assert said[:3] == ["A  a", "B  b", ""]
    return said[3:]


def test_equal_is_one_line() -> None:
    assert lines(alike=7, nbytes=4096) == [
        "7 tensors, 4.0 KiB, compared, 4.0 KiB of them by their checksums alone: equal"
    ]
    assert lines(alike=7, nbytes=4096, read=4096) == ["7 tensors, 4.0 KiB, compared: equal"]


def test_layers_that_differ_are_folded_and_the_worst_are_named() -> None:
    some = tuple(unlike(f"h.{n}.w", largest=n / 8) for n in range(8))
    assert lines(tensors=some, read=1, nbytes=1)[1:] == [
        "",
        "model: not equal",
        "  h.{0…7}.w  8 tensors",
        "  24 of 32 elements differ, max abs diff 0.875, max rel diff 0.25; most in",
        "    h.7.w: 3 of 4, max abs diff 0.875, max rel diff 0.25",
        "    h.6.w: 3 of 4, max abs diff 0.75, max rel diff 0.25",
        "    h.5.w: 3 of 4, max abs diff 0.625, max rel diff 0.25",
        "    h.4.w: 3 of 4, max abs diff 0.5, max rel diff 0.25",
        "    h.3.w: 3 of 4, max abs diff 0.375, max rel diff 0.25",
    ]
    assert "    h.0.w: 3 of 4, max abs diff 0, max rel diff 0.25" in lines(True, tensors=some)


def test_shapes_and_dtypes_are_told() -> None:
    one = Unlike("model", "w", ("F32", "BF16"), ((2, 3), (3, 2)), 6, 6, inf, inf)
    assert lines(tensors=(one,))[-1] == "  w  [2, 3] in A, [3, 2] in B  float32 in A, bfloat16 in B"


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
    said = lines(fields=fields)
    assert said[2] == "training state: 25 differ"
    assert said[3] == "  scheduler.x0: 0 in A, nothing in B"
    assert said[-1] == "  … and 5 more lines; --all shows them"
    assert len(lines(True, fields=fields)) == 3 + 25
    assert lines(files=(Change("config.json", "0" * 64, "1" * 64),))[-1].startswith("  config.json")
    assert lines(fields=(Change("", ABSENT, {}),))[-1] == "  all of it: nothing in A, {} in B"


def test_equal_says_if_tensors_alone_were_compared() -> None:
    (line,) = lines(alike=1, nbytes=4, read=4, tensors_alone=True)
    alone = "equal; configuration, tokenizer and training were not compared"
    assert line == f"1 tensor, 4 B, compared: {alone}"


def test_ties_that_differ_and_a_name_of_nothing_are_shown() -> None:
    said = lines(ties=(Change("head", "a", "b"),), only=({"model": [""]}, {}))
    assert said[-2:] == ["tied names: 1 differ", '  head: "a" in A, "b" in B']
    assert '  ""' in said
