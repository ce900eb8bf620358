"""Every dtype of safetensors: what torch has is saved and loaded, the rest is not in the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint.dtypes import BITS, DTYPES
from shardwise.checkpoint.source import Source
from shardwise.comm.protocol import Comm
from shardwise.convert.catalogue import Catalogue
from shardwise.convert.difference import compare
from shardwise.convert.export import export
from tests.copies import on_ranks

FOUR, SCALE = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu


def four_bits(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8).view(FOUR)


class Quantised(nn.Module):
    """Weights of 4 bits with a scale for each row, and one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        values = four_bits(*range(12)).view(3, 4)
        self.packed = nn.Parameter(values, requires_grad=False)
        scales = torch.tensor([1.0, 2.0, 4.0]).to(SCALE)
        self.scale = nn.Parameter(scales, requires_grad=False)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def others(path: Path, **tensors: tuple[str, list[int], int]) -> Path:
    """One file with these: ``(dtype, shape, bytes)``."""
    header, at = {}, 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))
    return path


def raw(value: Tensor) -> Tensor:
    return value.detach().view(torch.uint8)


def test_all_that_safetensors_knows_is_known(tmp_path: Path) -> None:
    for code, bits in BITS.items():
        with safe_open(others(tmp_path / code, x=(code, [8], bits)), "pt") as opened:
            assert list(opened.keys()) == ["x"]
        with Source.open(tmp_path / code) as source:
            assert source.header(code).tensors["x"].dtype == code
    assert set(BITS) - set(DTYPES) == {"F6_E2M3", "F6_E3M2"}


def test_tensors_for_microscaling_are_saved_and_loaded(tmp_path: Path) -> None:
    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm)
        sharded.save(tmp_path / "step-1")
        for bucket in sharded.buckets:
            bucket.shard.detach().view(torch.uint8).zero_()
        sharded.load(tmp_path / "step-1")
        return sharded.state_dict()

    loaded, whole = on_ranks(2, Quantised, rank), Quantised().state_dict()
    for state in (*loaded, load_file(tmp_path / "step-1" / "model.safetensors")):
        assert {name: value.dtype for name, value in state.items()} == {
            name: value.dtype for name, value in whole.items()
        }
        assert all(torch.equal(raw(state[name]), raw(value)) for name, value in whole.items())


def test_what_torch_lacks_is_named_only_if_it_is_wanted(tmp_path: Path) -> None:
    path = others(
        tmp_path / "model.safetensors",
        weight=("F32", [4, 4], 64),
        six=("F6_E2M3", [4, 8], 24),
        odd=("F4", [2, 3], 3),
        scale=("F8_E8M0", [4], 4),
    )
    model = nn.Linear(4, 4, bias=False)
    report = sw.shard(model).load(path, strict=False)
    assert report.unexpected == ("six", "odd", "scale")
    assert not model.weight.any()
    wanting = nn.Linear(8, 4, bias=False)
    others(path, weight=("F6_E2M3", [4, 8], 24))
    with pytest.raises(sw.CheckpointError, match=r"weight: stored as F6_E2M3, the model has F32"):
        sw.shard(wanting).load(path, cast=True)
    refused = pytest.raises(
        sw.CheckpointError, match=r"'weight' is stored as F6_E2M3, and torch has"
    )
    with Source.open(path) as source, refused:
        export(source, tmp_path / "out")
    assert Catalogue.read(path).problems == ()


def test_two_of_four_bits_are_compared(tmp_path: Path) -> None:
    for name, values in (("one", four_bits(0x21, 0x07)), ("other", four_bits(0x21, 0x0F))):
        (tmp_path / name).mkdir()
        save_file({"x": values}, tmp_path / name / "model.safetensors")
    with Source.open(tmp_path / "one") as one, Source.open(tmp_path / "other") as other:
        [found] = compare(one, other).tensors
    assert found.max_abs_diff == 12.0  # 6 and -6
