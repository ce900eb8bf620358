from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.recipe.data_config import BatchConfig
from shardwise.train.batches import (
    IGNORED,
    Batches,
    MicroBatch,
    Rows,
    accumulation,
    evenly_spaced,
    permutation,
    rank_batches,
)
from shardwise.train.worker import Worker
from tests.recorder.clocks import DEVICE
from tests.recorder.device import Device


def rows(tokens: int = 101, context: int = 10) -> Rows:
    return Rows(np.arange(tokens, dtype=np.int32), context)


def batches(rank: int = 0, ranks: int = 1, micro: int = 1, seed: int = 5) -> Batches:
    return Batches(rows(), BatchConfig(rows=12, micro=micro), seed, rank, ranks)


# --- rows ------------------------------------------------------------------------------------


@given(tokens=st.integers(0, 200), context=st.integers(2, 20))
def test_every_token_but_the_first_and_the_tail_is_a_target_once(tokens: int, context: int) -> None:
    source = rows(tokens, context)
    targets = source.take(np.arange(len(source))).targets.flatten().tolist()
    assert targets == list(range(1, len(source) * context + 1))
    assert (len(source) > 0) + len(targets) + source.dropped == tokens


def test_a_target_is_the_token_that_follows() -> None:
    batch = rows().take(np.array([0, 3]))
    assert batch.ids.tolist() == [list(range(10)), list(range(30, 40))]
    assert torch.equal(batch.targets, batch.ids + 1)


def test_a_negative_index_fills_the_shape_and_counts_for_nothing() -> None:
    batch = rows().take(np.array([2, -1]))
    assert batch.ids.shape == (2, 10)
    assert batch.targets[0].tolist() == list(range(21, 31))
    assert batch.targets[1].tolist() == [IGNORED] * 10


def test_workers_that_train_apart_take_rows_of_their_own() -> None:
    config = BatchConfig(rows=3, micro=1)
    own = [
        Batches(Rows(np.arange(121, dtype=np.int32), 10), config, 5, 0, 1, Worker(n, 2))
        for n in (0, 1)
    ]
    numbers = [batch.ids[0, 0].item() for of in own for step in (0, 1) for batch in of.step(step)]
    assert sorted(numbers) == list(range(0, 120, 10))


# --- the global batch ------------------------------------------------------------------------


@pytest.mark.parametrize(("micro", "ranks", "expected"), [(1, 1, 12), (2, 3, 2), (6, 2, 1)])
def test_rows_are_micro_times_accumulation_times_ranks(
    micro: int, ranks: int, expected: int
) -> None:
    assert accumulation(BatchConfig(rows=12, micro=micro), ranks) == expected


@pytest.mark.parametrize(
    ("rows", "micro", "ranks", "fact", "advice"),
    [
        (32, 5, 2, "not divisible by batch.micro 5 × 2 ranks = 10", "batch.micro 4 or 8"),
        (4, 8, 1, "not divisible by batch.micro 8 × 1 rank = 8", "batch.micro 4"),
    ],
)
def test_a_micro_batch_that_does_not_divide_names_those_that_do(
    rows: int, micro: int, ranks: int, fact: str, advice: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        accumulation(BatchConfig(rows=rows, micro=micro), ranks)
    assert str(caught.value) == f"batch.rows is {rows}, which is {fact}; use {advice}."


@pytest.mark.parametrize(
    ("rows", "starts", "begins"), [(16, "2 or 4 ranks", "15 or 18"), (2, "2 ranks", "3")]
)
def test_ranks_that_do_not_divide_the_batch_are_told_how_many_do(
    rows: int, starts: str, begins: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        accumulation(BatchConfig(rows=rows, micro=1), 3)
    assert str(caught.value) == (
        f"batch.rows is {rows}, which is not divisible by 3 ranks; start {starts}, or begin a run "
        f"with batch.rows {begins}."
    )


@pytest.mark.parametrize("step", [0, 1, 7])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_a_global_batch_is_the_same_at_every_world_size(step: int, micro: int, ranks: int) -> None:
    def whole(size: int, rows_at_once: int) -> torch.Tensor:
        parts = [batches(rank, size, rows_at_once).step(step) for rank in range(size)]
        return torch.cat([part.ids for rank in parts for part in rank])

    assert torch.equal(whole(ranks, micro), whole(1, 1))


def test_ranks_share_no_row() -> None:
    first = {int(batch.ids[0, 0]) for rank in (0,) for batch in batches(rank, 2).step(0)[:4]}
    second = {int(batch.ids[0, 0]) for rank in (1,) for batch in batches(rank, 2).step(0)[:4]}
    assert first.isdisjoint(second)


def test_an_epoch_holds_every_row_once_and_the_next_one_in_another_order() -> None:
    source = batches()
    first, second = source.samples(0, 10), source.samples(10, 10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first.tolist() != second.tolist()


@given(first=st.integers(0, 40), count=st.integers(1, 30))
def test_a_sample_depends_on_its_number_alone(first: int, count: int) -> None:
    assert np.array_equal(batches().samples(first, count), batches().samples(0, 80)[first:][:count])


def test_another_seed_is_another_order() -> None:
    assert batches(seed=5).samples(0, 10).tolist() != batches(seed=6).samples(0, 10).tolist()


def test_the_order_is_written_down() -> None:
    # A change here changes what every recipe trains on.
    assert permutation(8, seed=0, epoch=0).tolist() == [4, 0, 1, 7, 6, 2, 5, 3]
    assert batches().accumulation == 12


def test_no_row_is_preferred() -> None:
    firsts = np.bincount([permutation(4, seed, 0)[0] for seed in range(4_000)])
    assert (abs(firsts - 1_000) < 120).all()  # about four standard deviations


# --- validation ------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "expected"), [(3, [0, 3, 6]), (10, list(range(10))), (99, None)])
def test_rows_are_spread_evenly(count: int, expected: list[int] | None) -> None:
    assert evenly_spaced(10, count).tolist() == (expected or list(range(10)))


@given(count=st.integers(0, 40), micro=st.integers(1, 5), ranks=st.integers(1, 5))
def test_validation_rows_are_shared_out_once_in_equally_many_passes(
    count: int, micro: int, ranks: int
) -> None:
    parts = [rank_batches(np.arange(count), micro, rank, ranks) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    assert all(len(batch) == micro for part in parts for batch in part)
    real = [i for part in parts for batch in part for i in batch.tolist() if i >= 0]
    assert sorted(real) == list(range(count))


def test_the_host_does_not_wait_until_a_batch_is_on_a_device() -> None:
    device = Device()
    with device.installed():
        batch = MicroBatch(torch.zeros(2, 3), torch.ones(2, 3))
        moved = batch.to(DEVICE)
        assert not device.accesses.is_host(moved.ids)
    assert (device.waits, device.faults) == ([], [])
    assert batch.to(torch.device("cpu")) is batch
