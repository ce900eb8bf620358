"""Which parameters had a gradient on any rank."""

from __future__ import annotations

import pytest

from shardwise.comm.local import LocalComm
from shardwise.comm.protocol import Comm
from shardwise.runtime.unused_parameters import ask_used
from tests.ranks import run_threads


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_a_parameter_is_used_where_any_rank_used_it(world: int) -> None:
    """Rank r used parameter r; nobody used the last one."""

    def rank(comm: Comm) -> list[bool]:
        return ask_used([index == comm.rank for index in range(world + 1)], comm)()

    assert run_threads(world, rank) == [[True] * world + [False]] * world


def test_a_rank_that_used_all_still_answers_the_others() -> None:
    def rank(comm: Comm) -> list[bool]:
        return ask_used([True, comm.rank == 0, comm.rank == 0], comm)()

    assert run_threads(3, rank) == [[True] * 3] * 3


def test_one_rank_alone_and_no_parameters_ask_nobody() -> None:
    comm = LocalComm()
    assert ask_used([True, False], comm)() == [True, False]
    assert (
        run_threads(2, lambda comm: (ask_used([], comm)(), comm.counters.calls)) == [([], {})] * 2
    )
    assert comm.counters.calls == {}
