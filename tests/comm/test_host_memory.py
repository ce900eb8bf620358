"""Host memory beside a device, which is the CPU here, so copies are complete when issued."""

from __future__ import annotations

import contextlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from shardwise.comm.host_memory import HostMemory
from shardwise.comm.memory import Memory
from tests.comm.transports.test_backend import Named

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


def test_a_load_casts_on_the_device() -> None:
    out, shard = torch.empty(3, dtype=torch.bfloat16, device="meta"), torch.ones(3)
    calls = {torch.float32: ["aten::_to_copy", "aten::copy_"], torch.bfloat16: ["aten::copy_"]}
    for dtype, names in calls.items():
        stored = shard.to(dtype)
        with Named() as mode:
            HostMemory(CPU).load(out, stored)
        assert mode.names == names


class Stream:
    """A stand-in for an accelerator's stream; it records its calls."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def wait_stream(self, other: Stream) -> None:
        self.notes.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: SimpleNamespace) -> None:
        self.notes.append(f"{self.name} waits for an event of {event.of}")

    device = torch.device("cuda")

    def record_event(self) -> SimpleNamespace:
        note = partial(self.notes.append, f"the host waits for {self.name}")
        return SimpleNamespace(of=self.name, synchronize=note)

    def __enter__(self) -> None:
        self.notes.append("copies")

    def __exit__(self, *_: object) -> None:
        pass


def test_beside_an_accelerator_copies_follow_what_was_computed_and_are_waited_for_when_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes: list[str] = []
    compute = Stream("compute", notes)
    beside = iter([Stream("load", notes), Stream("store", notes)])
    monkeypatch.setattr(torch, "Stream", lambda device: next(beside))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: compute)
    monkeypatch.setattr(HostMemory, "_new", Memory._new)  # nothing is pinned without a device
    host = HostMemory(torch.device("cuda"))
    a_copy = ["store waits for compute", "copies"]

    host.load(torch.empty(3), torch.ones(3)).wait()
    expected = ["load waits for compute", "copies", "compute waits for an event of load"]
    assert notes == expected
    notes.clear()
    gradients = [torch.ones(3), torch.ones(3)]
    host.store(gradients[0])
    assert (notes, host._storing[0][0] is gradients[0]) == (a_copy, True)
    notes.clear()
    host.store(gradients[1])  # the memory of the one before it may be used again
    assert notes == ["compute waits for an event of store", *a_copy]
    assert [source.data_ptr() for source, _ in host._storing] == [gradients[1].data_ptr()]
    notes.clear()
    host.wait()
    host.wait()  # for nothing more
    first, last = sorted(("load", "store"), key=lambda name: f"the host waits for {name}" in notes)
    assert notes == [f"{last} waits for {first}", f"the host waits for {last}"]
    assert host._storing == []


def test_what_a_block_has_copied_is_waited_for_also_after_an_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else memory would be freed to which the copy stream still writes."""
    notes: list[str] = []
    compute, copies = Stream("compute", notes), Stream("copy", notes)
    monkeypatch.setattr(torch, "Stream", lambda device: copies)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: compute)
    pendings = []
    with contextlib.suppress(KeyError), HostMemory(torch.device("cuda")).copying() as pending:
        pendings.append(pending)
        raise KeyError
    pendings[0].wait()
    assert notes == ["copy waits for compute", "copies", "compute waits for an event of copy"]
