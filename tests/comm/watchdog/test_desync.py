"""What is a difference, and how it reads. Tables of cursors; nothing runs here."""

from __future__ import annotations

import ctypes

import pytest

from shardwise.comm.watchdog.desync import (
    NO_TAG,
    Collective,
    RankProgress,
    diagnose,
    facts_differ,
    format_ranks,
    mismatch,
    missing_ranks,
    rank_died,
    rank_left,
    still_waiting,
    timed_out,
)

A, B, C, D = (Collective(seq, "all_gather", "gather", f"blocks.{seq}", 1024) for seq in range(4))
B2 = B._replace(unit="blocks.2")


def at(*recent: Collective, waits: int | None = None, ended: str = "") -> RankProgress:
    return RankProgress(recent[-1].seq + 1, recent, waits, ended)


MAY_GO_ON = {
    "nobody has said anything": {},
    "one waits, the other computes": {0: at(A, B, waits=1)},
    "both wait for the same": {0: at(A, B, waits=1), 1: at(A, B, waits=1)},
    "one finished what the other still receives": {0: at(A, B, C, waits=2), 1: at(A, B, waits=1)},
    "they wait in another order": {0: at(A, B, C, waits=0), 1: at(A, B, C, waits=2)},
    "an old cursor": {0: at(A, waits=0), 1: at(B, C, D, waits=3)},
    "one left after its part was sent": {0: at(A, B, waits=1), 1: at(A, B, ended="done")},
    "all have left": {0: at(A, B, ended="done"), 1: at(A, B, ended="done")},
}


@pytest.mark.parametrize("cursors", MAY_GO_ON.values(), ids=MAY_GO_ON)
def test_ranks_may_go_on(cursors: dict[int, RankProgress]) -> None:
    assert diagnose(cursors) == ""


CANNOT = {
    "another unit under one number": (
        {0: at(A, B, waits=1), 1: at(A, B2, waits=1)},
        (
            "collective 1 differs: rank 1 is at gather blocks.2 (1,024 bytes), "
            "rank 0 at gather blocks.1 (1,024 bytes). The last one in common was gather blocks.0."
        ),
    ),
    "another unit, and one rank does not remember what was before": (
        {0: at(A, B, waits=1), 1: at(B2, waits=1)},
        "rank 0 at gather blocks.1 (1,024 bytes). The last one in common was gather blocks.0.",
    ),
    "another size": (
        {0: at(A, waits=0), 1: at(A._replace(nbytes=8), waits=0)},
        (
            "collective 0 differs: rank 1 is at gather blocks.0 (8 bytes), "
            "rank 0 at gather blocks.0 (1,024 bytes). Nothing"
        ),
    ),
    "long ago, and both went on": (
        {0: at(A, B, C, waits=2), 1: at(A, B2, C, waits=0)},
        "collective 1 differs",
    ),
    "the first of several": (
        {0: at(A, B, C, waits=2), 1: at(A, B2, D._replace(seq=2), waits=2)},
        "collective 1 differs",
    ),
    "the odd one out comes first": (
        {0: at(A, B2), 1: at(A, B), 2: at(A, B2), 3: at(A, B2)},
        "rank 1 is at gather blocks.1 (1,024 bytes), ranks 0, 2 and 3 at gather blocks.2",
    ),
    "left before the one that is waited for": (
        {0: at(A, B, C, waits=2), 1: at(A, B, ended="its process ended normally")},
        (
            "rank 1 has left (its process ended normally after 2 collectives) while rank 0 "
            "waits at gather blocks.2 (collective 2, 1,024 bytes)"
        ),
    ),
}


@pytest.mark.parametrize(("cursors", "text"), CANNOT.values(), ids=CANNOT)
def test_ranks_cannot_go_on(cursors: dict[int, RankProgress], text: str) -> None:
    assert text in diagnose(cursors)


def test_ranks_that_have_not_come_are_those_that_have_not_said_so() -> None:
    cursors = {0: at(A, B, waits=1), 1: at(A, waits=0), 3: at(A, B, C, waits=2)}
    assert missing_ranks(cursors, 4, B) == [1, 2]


def test_the_kind_is_named_where_nothing_else_differs() -> None:
    text = mismatch({0: A, 1: A._replace(kind="reduce_scatter")})
    assert "rank 1 is at gather blocks.0 (reduce_scatter, 1,024 bytes)" in text
    assert "rank 0 at gather blocks.0 (all_gather, 1,024 bytes)" in text


def test_several_odd_ranks_are_many() -> None:
    text = mismatch({0: A, 1: B2, 2: B2, 3: A, 4: A})
    assert "ranks 1 and 2 are at gather blocks.2 (1,024 bytes), ranks 0, 3 and 4 at" in text


def test_every_sentence_says_what_follows_and_what_to_do() -> None:
    waiting = {0: B, 2: B}
    both = "rank 0 waits at gather blocks.1 (collective 1, 1,024 bytes) and rank 2 waits at"
    texts = [
        rank_left(1, "it raised KeyError('x')", 1, waiting),
        rank_died(1, waiting),
        timed_out([1, 3], 1800.0, waiting),
        timed_out([], 1800.0, waiting),
    ]
    for text in texts:
        assert both in text
        assert "This group cannot be used any more." in text
    assert texts[0].startswith("rank 1 has left (it raised KeyError('x') after 1 collectives)")
    assert "read rank 1's own output" in texts[0]
    assert "kernel log" in texts[1]
    assert texts[2].startswith("ranks 1 and 3 have not come within 1,800 s")
    assert texts[3].startswith("every rank arrived, but no data did within 1,800 s")


def test_only_the_facts_that_differ_are_listed_with_ranks_and_texts() -> None:
    text = facts_differ(
        [{"a": "1", "b": "2"}, {"a": "1", "b": "3"}, {"a": "1"}, {"a": "1", "b": "2"}]
    )
    assert text.startswith("1 setting is not the same on all ranks:\n")
    assert "\n  b: ranks 0 and 3: 2; rank 1: 3; rank 2: (absent)" in text
    assert "  a:" not in text


@pytest.mark.parametrize(("count", "ending"), [(10, ""), (12, "\n  … and 2 more")])
def test_the_first_ten_facts_that_differ_are_listed(count: int, ending: str) -> None:
    names = [f"fact {index:02}" for index in range(count)]
    text = facts_differ([dict.fromkeys(names, "a"), dict.fromkeys(names, "b")])
    listed = "\n".join(f"  {name}: rank 0: a; rank 1: b" for name in names[:10])
    assert f"{count} settings are not the same on all ranks:\n{listed}{ending}\nThey" in text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([2], "rank 2"),
        ([2, 0], "ranks 0 and 2"),
        ([0, 1], "ranks 0 and 1"),
        ([0, 1, 2, 3], "ranks 0–3"),
        ([0, 1, 2, 5, 7, 8, 9], "ranks 0–2, 5 and 7–9"),
    ],
)
def test_ranks_read_as_runs(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


def test_a_tag_depends_on_every_field_and_is_never_the_unused_one() -> None:
    others = [
        A._replace(seq=1),
        A._replace(kind="reduce_scatter"),
        A._replace(op="reduce"),
        A._replace(unit="blocks.1"),
        A._replace(nbytes=1025),
    ]
    assert [ctypes.c_int(tag).value for tag in (NO_TAG, NO_TAG + 1)] == [NO_TAG, -NO_TAG - 1]
    tags = {collective.tag for collective in [A, *others]}
    assert len(tags) == 6
    many = {A._replace(seq=seq).tag for seq in range(10_000)}
    assert len(many) > 9_990
    assert all(0 <= tag < NO_TAG for tag in many)


def test_the_lowest_rank_that_waits_says_it_for_all() -> None:
    cursors = {0: at(A), 1: at(A, waits=0), 2: at(A, waits=0), 3: at(A, ended="done")}
    assert [still_waiting(rank, cursors, [4], 5.2, A) for rank in (1, 2)] == [
        "ranks 1 and 2 have waited 5 s for rank 4 at gather blocks.0 (collective 0, 1,024 bytes)",
        "",
    ]


def test_a_backend_that_every_rank_waits_for_is_named() -> None:
    assert still_waiting(1, {1: at(A, waits=0)}, [], 20.0, A).startswith(
        "rank 1 has waited 20 s for the backend, though every rank has come, at gather blocks.0"
    )


def test_the_lines_of_the_programs_are_named_of_the_ranks_that_it_is_about() -> None:
    """What another rank published long before may be true no more."""
    rows = {
        0: (B, "`save(model)` at a.py:3"),
        1: (B2, "`f(x)` at a.py:4"),
        2: (B2, "`f(x)` at a.py:4"),
    }
    progress = {r: at(A, c, waits=1)._replace(call=call) for r, (c, call) in rows.items()}
    progress[3] = at(A, waits=0)._replace(call="`load()` at a.py:1")
    lines = " Look at rank 0: `save(model)` at a.py:3; ranks 1 and 2: `f(x)` at a.py:4."
    assert diagnose(progress).endswith(f"that depends on the rank.{lines}")
    ended = {0: progress[0], 3: at(A, ended="done")._replace(call="`load()` at a.py:1")}
    assert diagnose(ended).endswith("error. Look at rank 0: `save(model)` at a.py:3.")
