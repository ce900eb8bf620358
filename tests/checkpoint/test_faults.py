"""Whoever dies, and whenever: the next start goes on exactly, without a manual step.

A part of what ``python -m benchmarks faults`` does: every point and every rank that comes there,
but not with every way to save.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.case import (
    AGAIN,
    BOTH,
    EVERYBODY,
    LIMIT,
    NEW,
    ON_EVERY_RANK,
    SAVE_MODES,
    TWICE,
    Case,
    Kill,
    SaveMode,
    expected,
    launcher_cases,
    matrix,
    moments,
    nth_of,
    reached_by,
    sweeps,
)
from benchmarks.faults.run import NOBODY, Trials
from benchmarks.faults.server import Attempt, start
from benchmarks.faults.training import Final
from benchmarks.faults.trial import damage, try_case
from shardwise.checkpoint.failpoints import POINTS

pytestmark = pytest.mark.spawn


@pytest.fixture(scope="module")
def trials() -> Trials:
    return Trials()


def aimed(how: SaveMode, who: int, point: str) -> Case:
    return Case(how, Kill(who, point, nth_of(how, point)))


def short() -> list[Case]:
    """Every point on every rank, in the foreground and behind it; and what is special elsewhere."""
    every = [
        aimed(how, who, point)
        for how in (LIMIT, BOTH)
        for point in reached_by(how)
        for who in how.ranks(point)
    ]
    late = POINTS[POINTS.index("about to publish") :]
    again = [aimed(how, EVERYBODY, point) for how in (AGAIN, TWICE) for point in late]
    first = [Case(NEW, Kill(0, point, 1)) for point in ("folder made", "headers written")]
    return every + again + first


OFTEN = ("half of the data written", "about to publish", "about to remove")


def marked(cases: list[Case]) -> list[Any]:
    """Of the deaths at three points one is in every run of the tests: rank 0's or rank 1's."""
    unmarked = {*POINTS} - {*OFTEN}
    rows = []
    for case in sorted(cases, key=lambda case: POINTS.index(case.kill.point) % 2 != case.kill.who):
        marks = [pytest.mark.prove] if case.kill.point in unmarked else []
        rows.append(pytest.param(case, id=named(case), marks=marks))
        unmarked.add(case.kill.point)
    return rows


def named(case: Case) -> str:
    who = "all" if case.kill.who == EVERYBODY else f"rank {case.kill.who}"
    return f"{case.how.name}: {who}: {case.kill}"


@pytest.mark.parametrize("case", marked(short()))
def test_a_death_at_a_named_point(case: Case, trials: Trials) -> None:
    trial = trials.trial(case)
    assert trial.wrong == ()
    assert trial.killed
    assert not trial.hung


@pytest.mark.prove
@pytest.mark.parametrize("every", [1, 6])
def test_a_death_before_any_call_that_publishes(every: int, trials: Trials) -> None:
    """Where names cannot be exchanged: the old one has another name for a moment."""
    cases = sweeps({TWICE: trials.undisturbed(TWICE)[0].calls})
    assert len(cases) > 50
    for case in cases[-22::every]:
        assert trials.trial(case).wrong == (), case


@pytest.mark.prove
def test_three_deaths_at_random_times(trials: Trials) -> None:
    every = list(trials.killed(moments(30, seed=1), 3))
    assert [trial for trial in every if trial.wrong] == []
    assert sum(trial.killed for trial in every) == 3


@pytest.mark.prove
def test_ranks_do_not_outlive_their_launcher(trials: Trials) -> None:
    case = next(c for c in launcher_cases() if c.kill.who == 1)
    trial = trials.trial(case)
    assert trial.wrong == ()
    assert trial.killed
    assert not trial.hung


@pytest.mark.prove
def test_an_undisturbed_run_is_the_same_however_it_saves(trials: Trials) -> None:
    first = trials.undisturbed(NEW)
    assert all(len(ended.losses) == 4 and ended.resumed is None for ended in first)
    assert first[0].losses != first[1].losses
    for how in SAVE_MODES:
        for one, other in zip(trials.undisturbed(how), first, strict=True):
            assert one.equals(other), how


# --- the cases -------------------------------------------------------------------------------


def test_every_point_is_aimed_at_on_every_rank() -> None:
    struck = {(case.kill.point, case.kill.who) for case in matrix()}
    assert {point for point, _ in struck} == set(POINTS)
    assert {point for point, who in struck if who == 1} == ON_EVERY_RANK
    assert {point for point, who in struck if who == EVERYBODY} == set(POINTS)
    assert {case.how for case in matrix()} == set(SAVE_MODES)
    assert {case.kill.point for case in short()} == set(POINTS)
    assert {case.kill.point for case in launcher_cases()} == set(POINTS)


def test_what_the_next_start_takes_up_is_known_before() -> None:
    assert expected(aimed(NEW, 0, "about to publish")) == {1}
    assert expected(aimed(NEW, 0, "published")) == {2}
    assert expected(aimed(AGAIN, 1, "data synced")) == {2}
    assert expected(Case(NEW, Kill(0, "headers written", 1))) == {None}


# --- a judge who sees nothing proves nothing -------------------------------------------------

WELL = Final((1.0,), "a", "b", 1)


def judged(first: Attempt, second: Attempt, case: Case) -> str:
    def again(run: Path, case: Case) -> Attempt:
        run.mkdir()
        return second

    return "; ".join(try_case(case, (WELL, WELL), lambda run, case: first, again).wrong)


def test_the_judge_sees_what_is_wrong() -> None:
    case = aimed(NEW, 0, "published")
    dead = Attempt((-signal.SIGKILL, 1), (None, None), ("", "RanksDisagree: gone"), 1.0, 0.1)
    fine = Attempt((0, 0), (WELL, WELL), ("", ""), 1.0, 0.0)
    assert "rank 0 should have been killed" in judged(fine, fine, case)
    assert "did not end by themselves" in judged(replace(dead, hung=(1,)), fine, case)
    assert "rank 1 ended with 1 and did not say" in judged(
        replace(dead, errors=("", "KeyError")), fine, case
    )
    other = replace(WELL, state="c")
    assert "rank 1 ended elsewhere" in judged(dead, replace(fine, finals=(WELL, other)), case)
    assert "the next start failed: rank 0" in judged(dead, replace(fine, finals=(None, WELL)), case)
    assert "took up step 1; the newest was None" in judged(dead, fine, case)
    assert "the folder holds []" in judged(dead, fine, case)


def test_the_judge_sees_damage(tmp_path: Path) -> None:
    run = tmp_path / "run"
    start(run, Case(NEW, NOBODY))
    assert list(damage(run)) == []
    path = run / "step-2" / "training/optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (run / "latest").unlink()
    (run / "latest").symlink_to("step-9")
    lines = list(damage(run))
    assert any("training/optimizer.safetensors is damaged" in line for line in lines)
    assert any("step-9" in line or "no checkpoint here" in line for line in lines)
