"""Parity with torch's own engines: DDP and FSDP2 train the same model on the same ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from shardwise.api.shard import shard
from shardwise.comm.protocol import Comm

Batch = tuple[Tensor, Tensor]


def parameters_beside(
    comm: Comm, model: nn.Module, other: nn.Module, batches: list[Batch]
) -> list[tuple[Tensor, Tensor]]:
    """Train ``model`` with full_shard and ``other`` as it is, and pair their parameters, whole.

    Args:
        other: the same values, wrapped by another engine.
        batches: of this rank, one for each step.
    """
    sharded = shard(model, comm=comm)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    for x, y in batches:
        for trained in (model, other):
            F.cross_entropy(trained(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    states = model.state_dict()
    names = {name: name.removeprefix("module.") for name in other.state_dict()}
    pairs = [(states[names[name]], _whole(value)) for name, value in other.state_dict().items()]
    sharded.unshard()
    return pairs


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def _fsdp2(model: nn.Module) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        fully_shard(block)
    fully_shard(model)
    return model


RIVALS: dict[str, Callable[[nn.Module], nn.Module]] = {"DDP": _ddp, "FSDP2": _fsdp2}
"""Each engine of torch, as what wraps a model whose units are its ``blocks``."""


def can_run() -> bool:
    """They need a process group, and ours does not."""
    return dist.is_initialized()
