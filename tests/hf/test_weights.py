"""Loading holds a rank's shards and at most one bucket: bytes of tensors, as torch counts them."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests.hf.folders import tiny
from tests.ranks import run_threads
from tests.setup.test_materialise import Live

LARGER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8}


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
@pytest.mark.parametrize("world", [1, 4])
def test_it_holds_its_shards_and_at_most_one_bucket(
    architecture: str, world: int, tmp_path: Path
) -> None:
    folder = tiny(architecture, tmp_path, **LARGER)

    def rank(comm: Comm) -> float:
        with Live() as live:
            sharded = sw.hf.load(folder, comm=comm).sharded
        shards = sum(bucket.shard.nbytes for bucket in sharded.buckets)
        largest = max(b.layout.numel * b.dtypes.stored.itemsize for b in sharded.buckets)
        assert live.peak > shards
        return float((live.peak - shards) / largest)

    for buckets in run_threads(world, rank):
        print(f"{architecture} at {world} ranks: {buckets:.2f} of the largest bucket")  # noqa: T201
        assert buckets < 1
