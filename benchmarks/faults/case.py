"""Where a run is killed: every named point, rank and way to save, as a list. Pure.

A run takes ``STEPS`` steps and saves after each. Most cases strike in the second save, where there
is something to lose.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.checkpoint.failpoints import POINTS

STEPS = 4
EVERYBODY = -1
"""Instead of a rank: all processes of the run at once, as when the power goes."""

ON_EVERY_RANK = frozenset(
    {"snapshot taken", "half of the data written", "data written", "data synced"}
)
REMOVING = frozenset({"about to remove", "removed"})
PUBLISHED = POINTS.index("published")


@dataclass(frozen=True)
class SaveMode:
    """A way to save."""

    name: str  # in tables
    background: bool = False  # by ``save_async``
    # each step's checkpoint is saved twice, so that it replaces one of its name
    again: bool = False
    limit: int | None = None  # ``save_total_limit``
    # the file system can swap two names in one step; those of networks cannot
    exchanges: bool = True
    kind: str = "sharded"  # of checkpoint

    def ranks(self, point: str) -> tuple[int, ...]:
        """Who comes to this point: of two ranks, and of kind ``"full"`` rank 0 alone writes."""
        return (0, 1) if point in ON_EVERY_RANK and self.kind != "full" else (0,)

    @property
    def removes(self) -> bool:
        """Does a save remove something?"""
        return self.again or self.limit is not None


NEW = SaveMode("new name")
AGAIN = SaveMode("same name again", again=True)
TWICE = SaveMode("same name, two renames", again=True, exchanges=False)
BACKGROUND = SaveMode("background", background=True)
LIMIT = SaveMode("old ones go", limit=1)
BOTH = SaveMode("background, old ones go", background=True, limit=1)
FULL = SaveMode("kind full", limit=1, kind="full")
SAVE_MODES = (NEW, AGAIN, TWICE, BACKGROUND, LIMIT, BOTH, FULL)


@dataclass(frozen=True)
class Kill:
    """One SIGKILL."""

    who: int  # a rank, ``EVERYBODY``, or the launcher if ``launcher``
    point: str = ""  # when ``who`` comes to this point of a save …
    # … for the n-th time; or, without a point, before rank 0's n-th file-system call; or neither:
    nth: int = 0
    # at this share of the time from the first save's start to the last one's end
    share: float = 0.0
    launcher: bool = False  # it is the launcher that dies, when rank ``who`` is there

    def __str__(self) -> str:
        if self.point:
            return self.point if self.nth > 1 else f"{self.point}, first save"
        return f"before call {self.nth}" if self.nth else f"at {100 * self.share:.0f}% of the time"


@dataclass(frozen=True)
class Case:
    """A way to save and a kill."""

    how: SaveMode
    kill: Kill


def matrix() -> list[Case]:
    """Every point, every rank that comes there and all at once, and every way to save."""
    every = [
        Case(how, Kill(who, point, nth_of(how, point)))
        for how in SAVE_MODES
        for point in reached_by(how)
        for who in (*how.ranks(point), EVERYBODY)
    ]
    first = [
        Case(NEW, Kill(who, point, 1)) for point in reached_by(NEW) for who in NEW.ranks(point)
    ]
    return every + first


def reached_by(how: SaveMode) -> list[str]:
    """The points that a save of this kind comes to."""
    return [
        point
        for point in POINTS
        if (point != "snapshot taken" or how.background) and (point not in REMOVING or how.removes)
    ]


def nth_of(how: SaveMode, point: str = "") -> int:
    """How often the point has been reached when step 2 is saved, for the last time."""
    if point in REMOVING:
        return 1 if how.limit is not None else 2
    return 4 if how.again else 2


def expected(case: Case) -> set[int | None]:
    """The steps of which the next start may take the checkpoint up. Pure."""
    kill, how = case.kill, case.how
    if not kill.point:  # nobody knows what was under way
        return {2} if how.again and kill.nth else {None, *range(1, STEPS + 1)}
    if kill.point == "snapshot taken":  # the writer may be done before the copying says so
        return {1, 2}
    if kill.nth == 1 and how == NEW:
        return {1} if is_public(kill.point) else {None}
    return {2} if how.again or is_public(kill.point) else {1}


def is_public(point: str) -> bool:
    """Has the checkpoint its name at this point?"""
    return POINTS.index(point) >= PUBLISHED


def sweeps(calls: Mapping[SaveMode, Sequence[int]]) -> list[Case]:
    """All die before each file-system call of rank 0's last save of step 2.

    Args:
        calls: how many there were when each save of an undisturbed run began, and at its end.
    """
    return [
        Case(how, Kill(EVERYBODY, nth=nth))
        for how, begun in calls.items()
        for nth in range(begun[nth_of(how) - 1] + 1, begun[nth_of(how)] + 1)
    ]


def moments(count: int, seed: int = 0) -> list[Case]:
    """Kills at random times, of random ranks, with random ways to save."""
    chance = random.Random(seed)  # noqa: S311 - repeatable, not secret
    return [
        Case(
            chance.choice(SAVE_MODES), Kill(chance.choice((0, 1, EVERYBODY)), share=chance.random())
        )
        for _ in range(count)
    ]


def launcher_cases() -> list[Case]:
    """The launcher dies while a rank is at each point."""
    return [
        Case(how, Kill(who, point, nth_of(how, point), launcher=True))
        for how in (LIMIT, BOTH)
        for point in reached_by(how)
        if how is LIMIT or point in ON_EVERY_RANK
        for who in how.ranks(point)
    ]
