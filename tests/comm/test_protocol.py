"""What every Comm shares: labels, counters, its name, and the mean of a metric."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise.comm.protocol import Comm, Counters, Label
from shardwise.comm.transports.local import LocalComm
from shardwise.errors import ConfigError
from tests.ranks import run_threads


def test_a_label_reads_as_a_verb_and_a_unit() -> None:
    assert str(Label("gather", "blocks.3")) == "gather blocks.3"
    assert str(Label("agree")) == "agree"
    assert Label("gather", "a") == Label("gather", "a") != Label("gather", "b")


def test_counters_add_up_by_operation_until_they_are_reset() -> None:
    counters = Counters()
    counters.sent("gather", 100)
    counters.sent("gather", 50)
    counters.sent("reduce", 7)
    counters.waited("gather", 0.5)
    counters.waited("gather", 0.25)
    assert counters.calls == {"gather": 2, "reduce": 1}
    assert counters.bytes_sent == {"gather": 150, "reduce": 7}
    assert counters.seconds_waited == {"gather": 0.75}
    counters.reset()
    assert counters == Counters()


def test_the_mean_of_a_metric_is_the_same_on_every_rank_and_weighs_ranks_by_their_samples() -> None:
    def rank(comm: Comm) -> tuple[float, ...]:
        nothing = comm.rank == 1
        loss = torch.tensor(math.nan if nothing else comm.rank + 1.0, requires_grad=True)
        return comm.mean(comm.rank), comm.mean(loss, weight=0 if nothing else comm.rank + 1)

    assert run_threads(3, rank) == [(1.0, (1 * 1 + 3 * 3) / 4)] * 3
    assert LocalComm("cpu").mean(torch.tensor([2.5]), weight=7) == 2.5
    assert math.isnan(LocalComm("cpu").mean(2.5, weight=0))


def test_the_mean_of_a_list_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mean\.value is a list, and not a number or Tensor"):
        LocalComm("cpu").mean([1.0, 2.0])  # type: ignore[arg-type]


def test_a_comm_reads_as_its_rank_and_answers_to_torch_s_word() -> None:
    assert run_threads(2, lambda comm: (repr(comm)[-20:], comm.world_size)) == [
        ("Comm(rank 0 of 2, cpu)"[-20:], 2),
        ("Comm(rank 1 of 2, cpu)"[-20:], 2),
    ]
