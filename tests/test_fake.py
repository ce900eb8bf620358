"""A rank with no peers: defined results, true counts, any world."""

from __future__ import annotations

import pytest
import torch

from shardwise.comm.protocol import Comm, Label
from shardwise.errors import ConfigError
from tests.comm.laws import sum_of
from tests.fake import FakeComm
from tests.ranks import run_threads


def some_traffic(comm: Comm) -> None:
    n = 6
    comm.all_gather(torch.zeros(comm.size * n, dtype=torch.bfloat16), Label("gather")).wait()
    sum_of(comm, torch.zeros(comm.size * n))
    comm.broadcast(torch.zeros(9), 2, Label("broadcast")).wait()
    sizes = [[1, 2, 0, 3], [0, 0, 5, 0], [2, 2, 2, 2], [0, 1, 0, 0]]
    comm.all_to_all(torch.zeros(sum(sizes[comm.rank])), sizes, Label("scatter"))
    comm.agree({"a": "1"})


def test_peers_hold_what_this_rank_holds() -> None:
    comm = FakeComm(1, 3)
    full = torch.tensor([9.0, 9.0, 1.0, 2.0, 9.0, 9.0])
    comm.all_gather(full, Label("gather")).wait()
    assert full.tolist() == [1, 2, 1, 2, 1, 2]
    grads = torch.arange(6.0)
    assert sum_of(comm, grads).tolist() == [6, 9]
    assert sum_of(comm, grads, by="mean").tolist() == [2, 3]
    tensor = torch.ones(2)
    comm.broadcast(tensor, 0, Label("broadcast")).wait()
    assert tensor.tolist() == [1, 1]
    received = comm.all_to_all(torch.arange(1.0, 7), [[1, 2, 0], [1, 2, 3], [0, 1, 0]], Label("s"))
    assert received.tolist() == [0, 0, 2, 3, 0]


def test_a_narrow_wire_is_summed_wide() -> None:
    out = sum_of(FakeComm(0, 3), torch.tensor([1.0078125] * 3).bfloat16())
    assert out.item() == 3 * 1.0078125  # not a bfloat16


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_calls_and_bytes_are_those_of_a_real_group(rank: int) -> None:
    def real_rank(comm: Comm) -> tuple[dict[str, int], dict[str, int]]:
        some_traffic(comm)
        return comm.counters.calls, comm.counters.bytes_sent

    fake = FakeComm(rank, 4)
    some_traffic(fake)
    assert (fake.counters.calls, fake.counters.bytes_sent) == run_threads(4, real_rank)[rank]


def test_it_can_be_one_of_a_thousand_ranks() -> None:
    comm = FakeComm(1000, 1024)
    for _ in range(100):
        full = comm.memory.full(1024 * 16, torch.float32).zero_()
        comm.all_gather(full, Label("gather")).wait()
        sum_of(comm, full)
    assert comm.counters.bytes_sent["gather"] == 100 * 1023 * 64


def test_an_empty_piece_is_fine_and_a_rank_must_exist() -> None:
    FakeComm(0, 4).all_gather(torch.empty(0), Label("gather")).wait()
    with pytest.raises(ConfigError, match="rank 4 of 4: ranks are numbered from 0 to 3"):
        FakeComm(4, 4)
    with pytest.raises(ConfigError, match="cannot be split into 4"):
        FakeComm(0, 4).all_gather(torch.zeros(7), Label("gather"))
