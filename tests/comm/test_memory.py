"""Memory by what it is for. That every kind outlives inference mode is a law (laws.py)."""

from __future__ import annotations

import torch

from shardwise.comm.memory import Memory, SharedMemory
from shardwise.comm.transports.arena import Arena, Heap, SymmetricHeap


def test_a_full_bucket_is_freed_and_comes_back_in_the_same_storage() -> None:
    memory = Memory(torch.device("cpu"))
    full = memory.full(5, torch.float32)
    view, storage = full[2:], full.untyped_storage()
    memory.free(storage)
    assert storage.nbytes() == 0
    memory.refill(storage, 20)
    full.copy_(torch.arange(5.0))
    assert view.tolist() == [2.0, 3.0, 4.0]


def test_full_buckets_alone_lie_in_the_common_memory() -> None:
    own, common = Arena.create(), Arena.create()
    memory = SharedMemory(Heap(own, lambda _: False), SymmetricHeap(common, 0))
    tensors = [
        memory.shard(4, torch.float32),
        memory.full(4, torch.float32),
        memory.gradient(4, torch.float32),
    ]
    assert (memory.shared, Memory(torch.device("cpu")).shared) == (True, False)
    assert [common.offset_of(tensor) is not None for tensor in tensors] == [False, True, False]
    assert [own.offset_of(tensor) is not None for tensor in tensors] == [True, False, True]
