"""Host memory beside a device, which is the CPU here, so copies are complete when issued."""

from __future__ import annotations

import torch

from shardwise.comm.host_memory import HostMemory

CPU = torch.device("cpu")


def test_what_is_allocated_is_counted_until_its_last_view_is_gone() -> None:
    host = HostMemory(CPU)
    shard, gradient = host.shard(3, torch.float32), host.gradient(4, torch.bfloat16)
    assert host.nbytes == 12 + 8
    view = shard[1:]
    del shard, gradient
    assert host.nbytes == 12
    del view
    assert host.nbytes == 0


def test_copies_are_counted_and_a_load_casts() -> None:
    host = HostMemory(CPU)
    shard = host.shard(3, torch.float32).copy_(torch.arange(3.0))
    out = torch.empty(3, dtype=torch.bfloat16)
    with host.copying():
        host.load(out, shard).wait()
    assert out.tolist() == [0.0, 1.0, 2.0]
    stored = host.store(out)
    host.wait()
    assert stored.dtype is torch.bfloat16
    assert torch.equal(stored, out)
    assert stored.data_ptr() != out.data_ptr()
    assert host.copied == {"load": 12, "store": 6}
    assert host.nbytes == 12 + 6


def test_what_is_made_in_inference_mode_can_be_trained() -> None:
    with torch.inference_mode():
        shard = HostMemory(CPU).shard(3, torch.float32)
    assert not shard.is_inference()
