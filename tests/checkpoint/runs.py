"""A few steps of training, saved on some ranks and loaded on others, for the tests beside this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests.copies import clones, on_ranks
from tests.nets import Net
from tests.steps import train

Make = Callable[[Any], Optimizer]


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def steps(model: nn.Module, optimizer: Optimizer, net: Net, rank: int, numbers: range) -> None:
    """Take the steps of these numbers: each has its own batch on each rank."""
    for number in numbers:
        train(model, net.batch(100 * number + rank, 2))
        optimizer.step()
        optimizer.zero_grad()


def saved(
    net: Net,
    world: int,
    path: Path,
    strategy: str = "full_shard",
    make: Make = adamw,
    **options: Any,
) -> dict[str, Tensor]:
    """Train two steps on ``world`` threads and save them; the model's whole state."""

    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, strategy, comm=comm)
        optimizer = make(model.parameters())
        steps(model, optimizer, net, comm.rank, range(2))
        sharded.save(path, optimizer, sw.Training(step=2), **options)
        return clones(model.state_dict())

    return on_ranks(world, net.build, rank)[0]


def loaded_and_saved(
    net: Net, world: int, path: Path, again: Path, strategy: str = "full_shard", make: Make = adamw
) -> None:
    """Load on ``world`` threads, into a model with other values, and save it as it is."""

    def rank(comm: Comm, model: nn.Module) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
        sharded = sw.shard(model, strategy, comm=comm)
        optimizer = make(model.parameters())
        sharded.load(path, optimizer)
        sharded.save(again, optimizer, sw.Training(step=2))

    on_ranks(world, net.build, rank)


def names(folder: Path) -> list[str]:
    """What lies in a folder, and in its ``training``."""
    inner = [f"training/{path.name}" for path in (folder / "training").glob("*")]
    return sorted([path.name for path in folder.iterdir() if path.name != "training"] + inner)


def tensors(folder: Path, stem: str) -> dict[str, Tensor]:
    """All tensors of a checkpoint, as the safetensors library reads them."""
    by_name: dict[str, Tensor] = {}
    for path in sorted(folder.rglob(f"{stem}*.safetensors")):
        by_name |= load_file(path)
    return by_name


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """The same names, with the same bits."""
    return set(one) == set(other) and all(
        one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one
    )
