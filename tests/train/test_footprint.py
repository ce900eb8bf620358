from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwise.comm.protocol import Comm
from shardwise.comm.transports import threads
from shardwise.train.footprint import footprint, storage_bytes
from shardwise.train.job import build
from shardwise.train.records import Bytes
from tests.train.test_job import VOCABULARY, rows
from tests.train.tiny import tiny_recipe


def counted(folder: Path, world: int, strategy: str, *overrides: str) -> dict[str, Bytes]:
    recipe = tiny_recipe(folder, f"sharding.strategy={strategy}", *overrides)

    def rank(comm: Comm) -> dict[str, Bytes]:
        job = build(recipe, comm, rows(), VOCABULARY)
        job.forward_backward(0)
        job.optimizer.step()
        return {row.kind: row for row in footprint(job.sharded, job.optimizer, comm).rows}

    first, *others = threads.run(world, rank)
    assert all(other == first for other in others)
    return first


def test_memory_that_is_shared_counts_once() -> None:
    whole = torch.zeros(100)
    assert storage_bytes([whole, whole[10:20], whole.view(10, 10)]) == 400
    assert storage_bytes([whole, torch.zeros(3, dtype=torch.float64)]) == 424


def test_one_process_holds_everything_once(tmp_path: Path) -> None:
    by_kind = counted(tmp_path, 1, "full_shard")
    numel = 40 * 16 + 2 * (16 * 16 * 2 + 8 * 16 * 2 + 3 * 16 * 24 + 2 * 16) + 16
    assert by_kind["parameters"].whole == by_kind["gradients"].whole == 4 * numel
    steps = 4 * (1 + 2 * 9 + 1)  # AdamW keeps a step count of 4 bytes per parameter
    assert by_kind["optimizer state"].whole == 8 * numel + steps
    for row in by_kind.values():
        assert row.whole <= row.per_rank[0] <= 1.05 * row.whole + 512  # padding


def test_state_of_8_bits_is_counted_by_blocks_and_its_tables_once(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    options = ("optimizer.name=adamw_8bit", "model.width=64", "model.hidden=96")
    alone = counted(tmp_path, 1, "full_shard", *options)["optimizer state"]
    assert alone.per_rank == (alone.whole,)
    two = counted(tmp_path, 2, "full_shard", *options)["optimizer state"]
    assert two.whole == alone.whole
    assert sum(two.per_rank) == two.whole + 2 * 256 * 4  # each rank has both tables


@pytest.mark.parametrize(
    ("strategy", "split"),
    [
        ("full_shard", {"parameters", "gradients", "optimizer state"}),
        ("shard_grad_op", {"parameters", "gradients", "optimizer state"}),
        ("zero1", {"gradients", "optimizer state"}),
        ("no_shard", set()),
    ],
)
def test_what_a_strategy_splits_is_a_share_on_each_rank(
    tmp_path: Path, strategy: str, split: set[str]
) -> None:
    for kind, row in counted(tmp_path, 3, strategy).items():
        assert len(row.per_rank) == 3
        share = max(row.per_rank) / row.whole
        assert share == pytest.approx(1 / 3 if kind in split else 1, rel=0.1), (kind, row)


def test_what_is_in_host_memory_has_rows_of_its_own(tmp_path: Path) -> None:
    plain = counted(tmp_path, 2, "full_shard")
    rows = counted(tmp_path, 2, "full_shard", "sharding.offload=optimizer")
    for kind in ("parameters", "gradients", "optimizer state"):
        assert rows[f"{kind} in host memory"].whole == plain[kind].whole
        assert rows[f"{kind} in host memory"].per_rank == pytest.approx(plain[kind].per_rank)
    assert rows["parameters"] == Bytes("parameters", plain["parameters"].per_rank, 0)  # copies
    assert rows["gradients"].per_rank == rows["optimizer state"].per_rank == (0, 0)


def test_buffers_are_whole_on_every_rank(tmp_path: Path) -> None:
    buffers = counted(tmp_path, 2, "full_shard")["buffers"]
    assert buffers == Bytes("buffers", (2 * 16 * 4 * 4,) * 2, 2 * 16 * 4 * 4)
