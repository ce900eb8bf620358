"""What torch wrote becomes a checkpoint of ours, on any number of ranks, optimizer included."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.convert.dcp_import import _config, import_checkpoint
from tests.convert import torch_files
from tests.convert.torch_files import WholeState, adamw, net
from tests.copies import on_ranks
from tests.ranks import outcomes_of


def values(world: int, fn: Any, *args: Any) -> list[Any]:
    outcomes = outcomes_of(world, fn, *args)
    assert [outcome.error for outcome in outcomes] == [""] * world
    return [outcome.value for outcome in outcomes]


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WholeState]:
    """A folder with what FSDP2 and FSDP1 saved on two ranks, and what it was."""
    run = tmp_path_factory.mktemp("fsdp")
    return run, values(2, torch_files.fsdp_saves, str(run))[0]


def loaded(folder: Path, world: int) -> WholeState:
    """Model and optimizer on ``world`` ranks, with other values before, as whole tensors."""

    def rank(comm: Comm, model: nn.Module) -> WholeState:
        sharded = sw.shard(model, comm=comm)
        optimizer = adamw(model)
        sharded.load(folder, optimizer)
        return sharded.state_dict(), sharded.optimizer_state_dict(optimizer)

    return on_ranks(world, lambda: net(seed=7), rank)[0]


def assert_same(ours: WholeState, torchs: WholeState) -> None:
    states, optim = torchs
    assert list(ours[0]) == list(states)
    for name, value in states.items():
        assert torch.equal(ours[0][name], value), name
    assert set(ours[1]["state"]) == set(optim["state"])
    for name, one in optim["state"].items():
        for key, value in one.items():
            assert torch.equal(ours[1]["state"][name][key], value), (name, key)
    for key in ("lr", "betas", "eps", "weight_decay", "amsgrad"):
        assert ours[1]["param_groups"][0][key] == optim["param_groups"][0][key]


def test_fsdp2s_dcp_folder(fsdp: tuple[Path, WholeState], tmp_path: Path) -> None:
    run, torchs = fsdp
    imported = import_checkpoint(run / "dcp", tmp_path / "step-2")
    assert imported.path == tmp_path / "step-2"
    assert (imported.tensors, imported.left_out) == (9 + 3 * 6, ())
    for world in (1, 3):
        assert_same(loaded(imported.path, world), torchs)
    assert json.loads((imported.path / "training.json").read_text())["step"] == 2


def test_an_optimizer_flattened_by_torch(fsdp: tuple[Path, WholeState], tmp_path: Path) -> None:
    run, torchs = fsdp
    import_checkpoint(run / "flat", tmp_path / "step-2")
    assert_same(loaded(tmp_path / "step-2", 2), torchs)


@pytest.mark.parametrize(
    ("files", "left_out"),
    [(["both.pt"], ("epoch",)), (["pytorch_model_fsdp.bin", "optimizer.bin"], ())],
    ids=["one", "two"],
)
def test_model_and_optimizer_of_fsdp1_in_one_file_or_two(
    fsdp: tuple[Path, WholeState], files: list[str], left_out: tuple[str, ...], tmp_path: Path
) -> None:
    imported = import_checkpoint([fsdp[0] / name for name in files], tmp_path / "step-2")
    whole = torch.load(fsdp[0] / "both.pt", weights_only=True)
    assert_same(loaded(imported.path, 2), (whole["model"], whole["optim"]))
    assert imported.left_out == left_out


def test_a_script_of_ddp_with_a_plain_optimizer(tmp_path: Path) -> None:
    torchs = torch_files.ddp_saves(tmp_path / "last.pt", numbered=True)
    imported = import_checkpoint(tmp_path / "last.pt", tmp_path / "step-2")
    assert imported.left_out == ()
    assert_same(loaded(imported.path, 2), torchs)


def test_weights_alone_without_what_lies_beside_them(tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "model.pt")
    (tmp_path / "config.json").write_text('{"model_type": "somebody else\'s"}')
    imported = import_checkpoint(tmp_path / "model.pt", tmp_path / "weights")
    assert sorted(path.name for path in imported.path.iterdir()) == [
        "manifest.json",
        "model.safetensors",
    ]

    def rank(comm: Comm, model: nn.Module) -> tuple[bool, dict[str, Tensor]]:
        sharded = sw.shard(model, comm=comm)
        return sharded.load(imported.path).checked, sharded.state_dict()

    checked, states = on_ranks(2, lambda: net(seed=7), rank)[0]
    assert checked
    assert all(torch.equal(states[name], value) for name, value in net().state_dict().items())


def test_config_json_of_a_folder_is_kept_if_it_is_one(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"token": 1}')
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "net"}')
    assert _config([tmp_path]) == {"config.json": b'{"model_type": "net"}'}
    config.unlink()
    config.symlink_to(tmp_path / "secret")
    assert _config([tmp_path]) == {}


def test_moments_go_to_the_parameters_that_the_groups_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(reversed(list(model.named_parameters())))
    model(torch.tensor([[1.0, 2.0]])).square().sum().backward()
    optimizer.step()
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(states, tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", tmp_path / "out")
    moments = load_file(tmp_path / "out" / "training/optimizer.safetensors")
    for name, param in model.named_parameters():
        assert torch.equal(moments[f"exp_avg/{name}"], optimizer.state[param]["exp_avg"]), name


def test_a_class_that_it_does_not_tell_must_be_named(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.RMSprop(model.parameters())
    torch_files.steps(model, optimizer)
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt"
    )
    with pytest.raises(sw.CheckpointError, match="--optimizer-class AdamW"):
        import_checkpoint(tmp_path / "a.pt", tmp_path / "step-2")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
    import_checkpoint(tmp_path / "a.pt", tmp_path / "step-2", optimizer="RMSprop")
    training = json.loads((tmp_path / "step-2" / "training.json").read_text())
    assert training["optimizers"][0]["class"] == "RMSprop"


def test_a_broken_dcp_folder_leaves_nothing_behind(
    fsdp: tuple[Path, WholeState], tmp_path: Path
) -> None:
    broken = tmp_path / "dcp"
    shutil.copytree(fsdp[0] / "dcp", broken)
    cut = max(broken.glob("*.distcp"), key=lambda path: path.stat().st_size)
    cut.write_bytes(cut.read_bytes()[:-3000])
    with pytest.raises(sw.CheckpointError, match=r"could not be read: \w+"):
        import_checkpoint(broken, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]
