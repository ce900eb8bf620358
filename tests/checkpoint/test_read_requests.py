"""Elements arrive in the dtype and on the device that they are for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import read_requests
from shardwise.checkpoint.plan import BLOCK
from shardwise.checkpoint.read_requests import ReadRequest, read_into, request_for
from shardwise.checkpoint.reader import CheckpointReader

pytestmark = pytest.mark.usefixtures("large_blocks")


class _Holder(nn.Module):
    """Parameters by name."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value.clone()))

    def forward(self) -> None:
        """Nobody calls it."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
def test_elements_are_converted_by_way_of_one_block(dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.randn(BLOCK // 2 + 17)
    save_file({"x": value}, tmp_path / "model.safetensors")
    with CheckpointReader.open(tmp_path) as source:
        place = source.tensors("model")["x"]
        out = torch.zeros(len(value) - 5, dtype=dtype)
        read_into(source, [request_for(place, 3, out[:-2])])
    assert torch.equal(out[:-2], value[3:-4].to(dtype))
    assert out[-2:].tolist() == [0.0, 0.0]


def test_nothing_wanted_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"x": torch.ones(3), "none": torch.ones(0, 4)}, tmp_path / "model.safetensors")
    with CheckpointReader.open(tmp_path) as source:
        places, none = source.tensors("model"), torch.empty(0, 4)
        monkeypatch.setattr(CheckpointReader, "read_into", None)  # which nobody calls
        read_into(source, [request_for(places["x"], 2, none), request_for(places["none"], 0, none)])


def test_neighbours_share_a_read_and_holes_between_them_stay_out(tmp_path: Path) -> None:
    """Whole blocks go straight into several tensors; what nobody wants is not touched."""
    values = {f"t{k}": torch.randn(BLOCK // 4 * 3 // 8 + k) for k in range(9)}
    sw.shard(_Holder(values)).save(tmp_path / "a")
    with CheckpointReader.open(tmp_path / "a") as source:
        places = source.tensors("model")
        names = [f"t{k}" for k in (8, 0, 1, 2, 3, 5, 6)]
        outs = {name: torch.zeros(len(values[name]) - 3) for name in names}
        wants = [request_for(places[name], 2, outs[name]) for name in names]
        whole = torch.zeros_like(values["t7"])
        read_into(source, [*wants, request_for(places["t7"], 0, whole)])
    for name, out in outs.items():
        assert torch.equal(out, values[name][2:-1])
    assert torch.equal(whole, values["t7"])


@pytest.mark.prove
def test_many_small_tensors_fit_in_few_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than one system call takes, in less than one block each."""
    values = {f"t{k:04d}": torch.full((100,), float(k)) for k in range(1_500)}
    monkeypatch.setattr("shardwise.checkpoint.plan.LEAST", 256 << 10)
    sw.shard(_Holder(values)).save(tmp_path / "a")
    calls: list[int] = []
    read = os.preadv

    def counted(file: int, views: list[memoryview], at: int) -> int:
        calls.append(len(views))
        return read(file, views, at)

    with CheckpointReader.open(tmp_path / "a") as source:
        places = source.tensors("model")
        outs = {name: torch.empty(100) for name in values}
        monkeypatch.setattr(os, "preadv", counted)
        read_into(source, [request_for(places[name], 0, out) for name, out in outs.items()])
    assert all(torch.equal(outs[name], value) for name, value in values.items())
    assert max(calls) <= 512
    assert len(calls) < 12


def test_threads_read_windows_of_files_and_ranks_begin_in_different_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_requests, "WINDOW", BLOCK)
    values = {f"t{k}": torch.randn(BLOCK // 2) for k in range(4)}
    for name, value in values.items():
        save_file({name: value}, tmp_path / f"{name}.safetensors")
    with CheckpointReader.open(tmp_path) as source:
        places = source.tensors_in(f"{name}.safetensors" for name in values)
        real = read_requests._read
        for rank in range(2):
            began: list[str] = []

            def read(
                mine: CheckpointReader, run: list[ReadRequest], began: list[str] = began
            ) -> None:
                began.append(run[0].at[0])
                real(mine, run)

            monkeypatch.setattr(read_requests, "_read", read)
            filled = {name: torch.zeros_like(value) for name, value in values.items()}
            wants = [request_for(places[name], 0, filled[name]) for name in values]
            read_into(source, wants, rank, 2)
            assert all(torch.equal(filled[name], values[name]) for name in values)
            assert began[0] == f"t{2 * rank}.safetensors"


def test_what_one_thread_finds_damaged_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_requests, "WINDOW", BLOCK)
    value = torch.randn(6 * BLOCK // 4)
    save_file({"x": value}, tmp_path / "model.safetensors")
    with CheckpointReader.open(tmp_path) as source:
        place = source.tensors("model")["x"]
        os.truncate(tmp_path / "model.safetensors", 3 * BLOCK)
        with pytest.raises(sw.DamagedCheckpoint, match="cut off"):
            read_into(source, [request_for(place, 0, torch.empty_like(value))])
