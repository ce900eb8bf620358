"""The two lanes of a recorded step."""

from __future__ import annotations

from shardwise.report.one_step import MOST_MOMENTS, Moment, drawn, slices
from tests.report.runs import EVENTS, STEP

MOMENTS: list[Moment] = list(EVENTS)


def test_calls_and_transfers_are_slices_of_two_lanes() -> None:
    listed = [(s.lane, s.row, s.start, s.stop, s.label) for s in slices(MOMENTS)]
    assert listed == [
        ("link", 0, 0.01, 0.02, "gather a.b"),
        ("computation", 0, 0.02, 0.05, "a.b"),
        ("computation", 0, 0.06, 0.08, "a.b"),
        ("link", 0, 0.09, 0.11, "reduce a.b"),
        ("computation", 0, 0.11, 0.15, "update"),
    ]


def test_calls_within_calls_and_transfers_at_once_have_rows_of_their_own() -> None:
    events = [["gather", "a"], ["gather", "b"], ["enter", "a"], ["enter", "b"], ["exit", "b"]]
    events += [["exit", "a"]]
    moments: list[Moment] = [(float(n), [], [*e, "forward", ""]) for n, e in enumerate(events)]
    rows = {(s.lane, s.label): s.row for s in slices(moments)}
    assert rows == {
        ("link", "gather a"): 0,
        ("link", "gather b"): 1,
        ("computation", "b"): 1,
        ("computation", "a"): 0,
    }


def test_a_step_that_is_too_long_for_a_page_says_what_is_left_out() -> None:
    step = drawn({**STEP, "moments": EVENTS * 1_000})
    assert step is not None
    assert step["left_out"] == len(EVENTS) * 1_000 - MOST_MOMENTS
    assert drawn(None) is None


def test_what_was_planned_is_a_line_over_the_moments_that_have_it() -> None:
    step = drawn(STEP)
    assert step is not None
    assert step["planned"] == [(seconds, sum(n)) for seconds, n, event in EVENTS if event]
    assert drawn({key: STEP[key] for key in ("step", "kinds", "moments")})["planned"] == []  # type: ignore[index]
