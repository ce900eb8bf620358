"""Elements arrive in the dtype and on the device that they are for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardwise.checkpoint.plan import BLOCK
from shardwise.checkpoint.reader import fill, wanted
from shardwise.checkpoint.source import Source


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
def test_elements_are_converted_by_way_of_one_block(dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.randn(BLOCK // 2 + 17)
    save_file({"x": value}, tmp_path / "model.safetensors")
    with Source.open(tmp_path) as source:
        place = source.tensors("model")["x"]
        out = torch.zeros(len(value) - 5, dtype=dtype)
        assert fill(source, [wanted(place, 3, out[:-2])]) == 4 * (len(value) - 7)
    assert torch.equal(out[:-2], value[3:-4].to(dtype))
    assert out[-2:].tolist() == [0.0, 0.0]


def test_nothing_wanted_reads_nothing(tmp_path: Path) -> None:
    save_file({"x": torch.ones(3), "none": torch.ones(0, 4)}, tmp_path / "model.safetensors")
    with Source.open(tmp_path) as source:
        places = source.tensors("model")
        out = torch.empty(0)
        wants = [wanted(places["x"], 2, out), wanted(places["none"], 0, torch.empty(0, 4))]
        assert fill(source, wants) == 0
