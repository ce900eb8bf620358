"""Kind ``"local"``: each rank its own shards, back at the same layout, refused at another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import holdings, local
from shardwise.comm.protocol import Comm
from tests.checkpoint.runs import adamw, saved, steps
from tests.checkpoint.test_optimizer_dict import same
from tests.copies import clones, on_ranks, said
from tests.nets import NETS, Net
from tests.steps import STRATEGIES

DECODER, CONVNET = NETS[0], NETS[2]

Told = tuple[dict[str, Tensor], dict[str, Any]]


def told(sharded: sw.Sharded, optimizer: torch.optim.Optimizer) -> Told:
    return clones(sharded.state_dict()), sharded.optimizer_state_dict(optimizer)


def saved_locally(net: Net, world: int, path: Path, strategy: str = "full_shard") -> list[Told]:
    def rank(comm: Comm, model: nn.Module) -> Told:
        sharded = sw.shard(model, strategy, comm=comm)
        optimizer = adamw(model.parameters())
        steps(model, optimizer, net, comm.rank, range(2))
        sharded.save(path, optimizer, sw.Training(step=2), kind="local")
        return told(sharded, optimizer)

    return on_ranks(world, net.build, rank)


def loaded(net: Net, world: int, path: Path, strategy: str = "full_shard") -> list[Told]:
    def rank(comm: Comm, model: nn.Module) -> Told:
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
        sharded = sw.shard(model, strategy, comm=comm)
        optimizer = adamw(model.parameters())
        sharded.load(path, optimizer, sw.Training())
        return told(sharded, optimizer)

    return on_ranks(world, net.build, rank)


@pytest.mark.parametrize("net", NETS, ids=str)
def test_every_rank_gets_its_own_back(net: Net, tmp_path: Path) -> None:
    before = saved_locally(net, 3, tmp_path / "step-2")
    assert same(loaded(net, 3, tmp_path / "step-2"), before)  # buffers that differ by rank, too


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_with_every_strategy(strategy: str, tmp_path: Path) -> None:
    before = saved_locally(DECODER, 2, tmp_path / "step-2", strategy)
    assert same(loaded(DECODER, 2, tmp_path / "step-2", strategy), before)


def test_the_folder_says_what_it_is(tmp_path: Path) -> None:
    saved_locally(DECODER, 2, tmp_path / "step-2")
    assert sorted(path.name for path in (tmp_path / "step-2").iterdir()) == [
        "layout.json",
        "manifest.json",
        "model.rank0.safetensors",
        "model.rank1.safetensors",
        "optimizer.rank0.safetensors",
        "optimizer.rank1.safetensors",
        "ranks.rank0.safetensors",
        "ranks.rank1.safetensors",
        "training.json",
    ]
    assert json.loads((tmp_path / "step-2" / "manifest.json").read_text())["kind"] == "local"


def test_a_file_holds_the_shards_of_its_rank(tmp_path: Path) -> None:
    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm)
        sharded.save(tmp_path / "a", kind="local")
        return clones(sharded.local_state_dict())

    for number, shards in enumerate(on_ranks(3, DECODER.build, rank)):
        with safe_open(tmp_path / "a" / f"model.rank{number}.safetensors", "pt") as file:
            assert set(file.keys()) == {name for name, value in shards.items() if value.numel()}
            for name in file.keys():  # noqa: SIM118 - it is no dict
                assert torch.equal(file.get_tensor(name), shards[name].reshape(-1))


def refusal(path: Path, world: int, strategy: str = "full_shard", wrap: Any = None) -> str:
    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, strategy, wrap, comm)
        before = clones(sharded.local_state_dict())
        text = said(sw.CheckpointError, lambda: sharded.load(path))
        assert same(sharded.local_state_dict(), before)
        return text

    texts = on_ranks(world, DECODER.build, rank)
    return texts[0]


def test_another_layout_is_refused_and_both_are_named(tmp_path: Path) -> None:
    path = tmp_path / "step-2"
    saved_locally(DECODER, 2, path)
    here = "saved by 2 ranks with full_shard and 5 units; this is"
    assert f"{here} 3 ranks with full_shard and 5 units" in refusal(path, 3)
    assert f"{here} 2 ranks with shard_grad_op" in refusal(path, 2, "shard_grad_op")
    assert f"{here} 2 ranks with full_shard and 1 unit." in refusal(path, 2, wrap=sw.wrap.whole())
    assert "kind='sharded' or kind='full', which load anywhere" in refusal(path, 3)


def test_units_of_other_sizes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "step-2"
    saved_locally(DECODER, 2, path)

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, bucketing="none", comm=comm)
        return said(sw.CheckpointError, lambda: sharded.load(path))

    assert "of which 'embed' is another" not in on_ranks(2, DECODER.build, rank)[0]
    assert "is another" in on_ranks(2, DECODER.build, rank)[0]


def test_units_that_are_cut_elsewhere_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step-2"
    saved_locally(DECODER, 2, path)
    cut = holdings.homes

    def elsewhere(buckets: Any) -> Any:
        first, *others = cut(buckets)
        return [replace(first, start=first.start + 16), *others]

    monkeypatch.setattr(local, "homes", elsewhere)
    assert "Load it with the shardwise that saved it" in refusal(path, 2)


def test_in_the_background_too(tmp_path: Path) -> None:
    def rank(comm: Comm, model: nn.Module) -> Told:
        sharded = sw.shard(model, comm=comm)
        optimizer = adamw(model.parameters())
        steps(model, optimizer, DECODER, comm.rank, range(2))
        saving = sharded.save_async(
            tmp_path / "step-2", optimizer, sw.Training(step=2), kind="LOCAL_STATE_DICT"
        )
        assert saving is not None
        found = told(sharded, optimizer)
        steps(model, optimizer, DECODER, comm.rank, range(2, 3))
        saving.wait()
        return found

    before = on_ranks(2, DECODER.build, rank)
    assert same(loaded(DECODER, 2, tmp_path / "step-2"), before)


def test_damage_is_found(tmp_path: Path) -> None:
    saved_locally(DECODER, 2, tmp_path / "step-2")
    path = tmp_path / "step-2" / "model.rank1.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    with pytest.raises(sw.DamagedCheckpoint, match=r"model\.rank1\.safetensors is damaged"):
        loaded(DECODER, 2, tmp_path / "step-2")


def test_other_kinds_load_at_other_worlds(tmp_path: Path) -> None:
    for kind in ("sharded", "full"):
        state = saved(CONVNET, 3, tmp_path / kind, kind=kind)

        def rank(comm: Comm, model: nn.Module, kind: str = kind) -> dict[str, Tensor]:
            sharded = sw.shard(model, comm=comm)
            sharded.load(tmp_path / kind, adamw(model.parameters()))
            return clones(sharded.state_dict())

        assert same(on_ranks(2, CONVNET.build, rank)[1], dict(state))
