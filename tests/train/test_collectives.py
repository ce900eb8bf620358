from __future__ import annotations

import numpy as np
import pytest

from shardwise.comm.protocol import Comm
from shardwise.comm.transports import threads
from shardwise.train.collectives import all_gather_floats, broadcast_tokens


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_everybody_has_what_rank_0_had(world: int, count: int) -> None:
    values = np.arange(count, dtype=np.int32)

    def rank(comm: Comm) -> list[int]:
        return list(map(int, broadcast_tokens(comm, values if comm.rank == 0 else None, "numbers")))

    assert threads.run(world, rank) == [values.tolist()] * world


def test_numbers_are_gathered_in_rank_order_and_exact() -> None:
    def rank(comm: Comm) -> list[list[float]]:
        return all_gather_floats(comm, (comm.rank + 0.1, 2**53 - comm.rank), "numbers").tolist()

    expected = [[0.1, 2.0**53], [1.1, 2.0**53 - 1], [2.1, 2.0**53 - 2]]
    assert threads.run(3, rank) == [expected] * 3
