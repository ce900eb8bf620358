"""Checkpoints that earlier versions wrote."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests.checkpoint.runs import tensors
from tests.copies import on_ranks

STORED = Path(__file__).with_name("step-1-block-4-mib.zip")


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(1100, 1100, bias=False), nn.BatchNorm1d(1100), nn.Linear(1100, 3)
    )


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A checkpoint of two ranks, whose statistics differed; several files, with blocks of 4 MiB."""
    with zipfile.ZipFile(STORED) as file:
        file.extractall(tmp_path / "step-1")
    return tmp_path / "step-1"


@pytest.mark.parametrize("world", [1, 2])
def test_all_of_it_is_read(stored: Path, world: int) -> None:
    def rank(comm: Comm, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any], Any]:
        sharded = sw.shard(model, comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.1)
        report = sharded.load(stored, optimizer, sw.Training())
        assert (report.step, report.position, report.checked) == (1, (7, b"x"), True)
        assert bool(report.inexact) == (world == 1)
        assert optimizer.param_groups[0]["momentum"] == 0.5
        state = sharded.optimizer_state_dict(optimizer)["state"]
        return model.state_dict(), state, report.local

    loaded = on_ranks(world, build, rank)
    states, moments, local = loaded[-1]
    assert local == (1 if world == 2 else None)
    assert states["1.running_mean"].unique().tolist() == [world - 1]
    weights, momentum = tensors(stored, "model"), tensors(stored, "optimizer")
    for name, _ in build().named_parameters():
        assert torch.equal(states[name], weights[name])
        assert torch.equal(moments[name]["momentum_buffer"], momentum[f"momentum_buffer/{name}"])


def test_one_of_kind_local_is_refused_with_what_to_do(stored: Path) -> None:
    fields = json.loads((stored / "manifest.json").read_text())
    del fields["digest"]
    fields |= {"kind": "local", "ranks": [0, 1]}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    fields["digest"] = hashlib.sha256(text.encode()).hexdigest()
    (stored / "manifest.json").write_text(json.dumps(fields))
    with pytest.raises(sw.CheckpointError, match="Load it with the shardwise that saved it"):
        sw.shard(build()).resume(stored.parent)
