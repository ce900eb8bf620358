"""No wrapper's part of a name reaches a file or a state dict; one that is there does no harm."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

import shardwise as sw
from shardwise.checkpoint import wrappers
from shardwise.comm.protocol import Comm
from tests.checkpoint.runs import adamw, tensors
from tests.copies import on_ranks


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Sequential(nn.Linear(5, 5)))


def compiled() -> Any:
    return torch.compile(plain(), backend="eager")


def compiled_inside() -> nn.Module:
    model: Any = plain()
    model[2] = torch.compile(checkpoint_wrapper(model[2]), backend="eager")
    return nn.Sequential(*model)


def averaged() -> nn.Module:
    return AveragedModel(compiled())


WRAPPED = (compiled, compiled_inside, averaged)
PARAMETERS = [name for name, _ in plain().named_parameters()]


def stepped(sharded: sw.Sharded) -> torch.optim.Optimizer:
    """State of an optimizer without a forward pass, which a compiler would take seconds for."""
    optimizer = adamw(sharded.model.parameters())
    for number, param in enumerate(sharded.model.parameters()):
        param.grad = torch.full_like(param, number + 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def moved(sharded: sw.Sharded, run: Path) -> None:
    """Save with values that were changed, and statistics that differ by rank."""
    for name, buffer in sharded.model.named_buffers():
        if "running_mean" in name:
            buffer.fill_(sharded.comm.rank + 1.0)
    sharded.save(run / "step-1", stepped(sharded), sw.Training())


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("into", [plain, compiled])
@pytest.mark.parametrize("build", [plain, compiled, compiled_inside])
def test_either_loads_what_the_other_saved(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[[], nn.Module],
    into: Callable[[], nn.Module],
    earlier: bool,
) -> None:
    """Earlier versions stored the names with what wrappers add to them."""

    def load(comm: Comm, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
        sharded = sw.shard(model, comm=comm)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        optimizer = adamw(model.parameters())
        report = sharded.load(tmp_path / "step-1", optimizer, sw.Training())
        assert report.inexact == ()
        return sharded.state_dict(), sharded.optimizer_state_dict(optimizer)["state"]

    with monkeypatch.context() as patch:
        if earlier:
            patch.setattr(wrappers, "WRAPPERS", set())
        on_ranks(2, build, lambda comm, model: moved(sw.shard(model, comm=comm), tmp_path))
    assert earlier != ("0.weight" in tensors(tmp_path / "step-1", "model")) or build is not compiled
    for number, (states, moments) in enumerate(on_ranks(2, into, load)):
        assert states["1.running_mean"].unique().tolist() == [number + 1.0]
        assert all(states[name].abs().sum() > 0 for name in PARAMETERS)
        assert all(moments[name]["exp_avg"].abs().sum() > 0 for name in PARAMETERS)


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."]
)
def test_a_file_of_another_program_with_such_names_is_read(tmp_path: Path, prefix: str) -> None:
    states = {f"{prefix}{name}": value + 1 for name, value in plain().state_dict().items()}
    save_file(states, tmp_path / "model.safetensors")
    sharded = sw.shard(plain())
    assert not sharded.load(tmp_path).missing
    assert torch.equal(sharded.state_dict()["0.bias"], states[f"{prefix}0.bias"])
    sharded.load_state_dict(states)


def test_a_module_that_a_model_calls_module_keeps_its_name(tmp_path: Path) -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    sharded = sw.shard(model)
    sharded.save(tmp_path / "step-1")
    assert {*tensors(tmp_path / "step-1", "model")} == {"module.weight", "module.bias"}
    assert not sharded.load(tmp_path / "step-1").missing


def test_the_configuration_names_the_class_that_was_wrapped(tmp_path: Path) -> None:
    class Config:
        def to_json_string(self) -> str:
            return "{}"

    model: Any = plain()
    model.config = Config()
    wrapped: Any = torch.compile(model, backend="eager")
    sw.shard(wrapped).save(tmp_path / "step-1")
    assert json.loads((tmp_path / "step-1" / "config.json").read_text())["architectures"] == [
        "Sequential"
    ]
