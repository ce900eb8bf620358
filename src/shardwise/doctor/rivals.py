"""Torch's own engines, DDP and FSDP2, on the same ranks: set up, and trained for parity."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from shardwise.api.shard import shard
from shardwise.comm.protocol import Comm
from shardwise.plan.units.units import choose_units

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


def ddp(model: nn.Module) -> nn.Module:
    """``model`` in torch's DDP, without a second copy of the gradients."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp2(model: nn.Module, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    """``model`` under ``fully_shard``, in our units.

    The last unit stays gathered between forward and backward, as in torchtitan.
    """
    policy = policy or MixedPrecisionPolicy()
    units = [unit.modules for unit in choose_units(model) if model not in unit.modules]
    for modules in units:
        frees = modules is not units[-1]
        fully_shard(list(modules), reshard_after_forward=frees, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


RIVALS: dict[str, Callable[[nn.Module], nn.Module]] = {"DDP": ddp, "FSDP2": fsdp2}
"""Each engine of torch, as what wraps a model."""


def can_run() -> bool:
    """They need a process group, and ours does not."""
    return dist.is_initialized()
