"""A checkpoint of ours, read by ``torch.distributed.checkpoint.load`` into FSDP2."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.convert import dcp_export as exported
from shardwise.convert.dcp_export import export_dcp
from shardwise.convert.dcp_import import import_checkpoint
from tests.checkpoint.runs import tensors
from tests.convert import torch_files
from tests.convert.test_dcp_import import assert_same, values
from tests.convert.torch_files import WholeState, adamw, net
from tests.copies import on_ranks
from tests.nets import NETS

TIED = NETS[1]


def saved(path: Path, world: int = 3) -> WholeState:
    """Two steps on ``world`` ranks, as a checkpoint and as whole tensors."""

    def rank(comm: Comm, model: nn.Module) -> WholeState:
        sharded = sw.shard(model, comm=comm)
        optimizer = adamw(model)
        torch_files.steps(model, optimizer)
        sharded.save(path, optimizer, sw.Training(step=2))
        return sharded.state_dict(), sharded.optimizer_state_dict(optimizer)

    return on_ranks(world, net, rank)[0]


def test_fsdp2_loads_model_and_optimizer(tmp_path: Path) -> None:
    ours = saved(tmp_path / "step-2")
    result = export_dcp(tmp_path / "step-2", tmp_path / "dcp")
    assert (result.path, result.tensors) == (tmp_path / "dcp", 9 + 3 * 6)
    torchs = values(2, torch_files.fsdp2_loads, str(tmp_path))
    assert_same(ours, torchs[0])  # torch gathers on rank 0 alone


def test_there_and_back_is_the_same(tmp_path: Path) -> None:
    saved(tmp_path / "step-2")
    export_dcp(tmp_path / "step-2", tmp_path / "dcp")
    import_checkpoint(tmp_path / "dcp", tmp_path / "again")
    for stem in ("model", "optimizer"):
        before, after = (tensors(tmp_path / name, stem) for name in ("step-2", "again"))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_weights_of_a_hugging_face_folder(tmp_path: Path) -> None:
    weights = {
        "a": torch.randn(3, 4),
        "b": torch.tensor(2),
        "c": torch.ones(5, dtype=torch.bfloat16),
    }
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    export_dcp(tmp_path / "hf", tmp_path / "dcp")
    states = {"model": {name: torch.zeros_like(value) for name, value in weights.items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp_load(states, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(states["model"][name], value) for name, value in weights.items())


def test_tied_weights_are_there_under_each_name(tmp_path: Path) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm).save(tmp_path / "weights")

    on_ranks(2, TIED.build, rank)
    export_dcp(tmp_path / "weights", tmp_path / "dcp")
    with (tmp_path / "dcp" / ".metadata").open("rb") as file:
        names = set(pickle.load(file).state_dict_metadata)
    assert {"model.embed.weight", "model.lm_head.weight"} <= names


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def test_no_tensor_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hf").mkdir()
    weights = {f"w{k}": torch.zeros(2 << 20) for k in range(8)}
    save_file(weights, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    del weights
    read, before, most = exported._read, anonymous(), []

    def watched(*args: Any) -> torch.Tensor:
        most.append(anonymous() - before)
        return read(*args)

    monkeypatch.setattr(exported, "_read", watched)
    export_dcp(tmp_path / "hf", tmp_path / "dcp")
    assert len(most) == 8
    assert max(most) < 24 << 20  # of 64 MiB


def test_weights_alone_if_told(tmp_path: Path) -> None:
    saved(tmp_path / "step-2", world=1)
    assert export_dcp(tmp_path / "step-2", tmp_path / "dcp", with_optimizer=False).tensors == 9
    with (tmp_path / "dcp" / ".metadata").open("rb") as file:
        names = set(pickle.load(file).state_dict_metadata)
    assert {name.partition(".")[0] for name in names} == {"model"}


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_disk_that_is_full_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrapped: bool
) -> None:
    """torch says it as no ``OSError``, and wraps it as what is no ``Exception``."""
    saved(tmp_path / "step-2", world=1)

    def full(*_: object, **__: object) -> None:
        error = RuntimeError("unexpected pos 64 vs 0")
        raise CheckpointException("write", {0: (error, StackSummary())}) if wrapped else error

    monkeypatch.setattr(exported, "save", full)
    with pytest.raises(
        sw.CheckpointError, match=r"unexpected pos 64 vs 0\. Check whether the disk"
    ):
        export_dcp(tmp_path / "step-2", tmp_path / "dcp")
    monkeypatch.setattr("shardwise.checkpoint.disk.free_bytes", lambda folder: 100)
    with pytest.raises(sw.CheckpointError, match="while it is written"):
        export_dcp(tmp_path / "step-2", tmp_path / "dcp")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-2"]


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    saved(tmp_path / "step-2")
    (tmp_path / "dcp").mkdir()
    with pytest.raises(sw.CheckpointError, match="left as it is"):
        export_dcp(tmp_path / "step-2", tmp_path / "dcp")


def test_a_damaged_checkpoint_leaves_nothing_behind(tmp_path: Path) -> None:
    saved(tmp_path / "step-2")
    path = tmp_path / "step-2" / "training/optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(sw.CheckpointError, match="is damaged"):
        export_dcp(tmp_path / "step-2", tmp_path / "dcp")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-2"]
