"""The three ways to run a program: plain on one process, shardwise, and FSDP2.

A program sees what a user of plain PyTorch would have to change, and nothing else: it shards a
model, takes its rank's rows of a global batch, and asks for whole values at the end. Everything
in between is plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardwise as sw
from benchmarks.programs.nets import Block
from shardwise.comm.connect import over

Model = TypeVar("Model", bound=nn.Module)


class Plain:
    """One process, the global batch."""

    rank, world = 0, 1

    def shard(self, model: Model) -> Model:
        """Shard ``model`` in place over the ranks, and return it."""
        return model

    def part(self, batch: Tensor) -> Tensor:
        """``[B, …] → [B / world, …]``: this rank's rows of a global batch."""
        return batch

    def mean(self, loss: Tensor) -> float:
        """A loss of this rank's rows, averaged over the ranks."""
        return loss.item()

    def whole(self, model: nn.Module) -> dict[str, Tensor]:
        """Every parameter and buffer, whole, by name."""
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002
        """Backward passes inside keep their gradients on this rank."""
        return nullcontext()

    def clip(self, model: nn.Module, max_norm: float) -> float:
        """Clip the gradients by their global norm, which is returned."""
        return float(nn.utils.clip_grad_norm_(model.parameters(), max_norm))

    def full_params(self, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002
        """Parameters are whole inside, and what is written to them is kept."""
        return nullcontext()

    def forward_method(self, model: nn.Module, name: str) -> None:
        """Let the method of this name be called like ``forward``."""


class _Ranks:
    """What both sharded engines share: the ranks of the default process group."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def part(self, batch: Tensor) -> Tensor:
        return batch.chunk(self.world)[self.rank]

    def mean(self, loss: Tensor) -> float:
        total = loss.detach().double()
        dist.all_reduce(total)
        return total.item() / self.world


class Shardwise(_Ranks):
    """``sw.shard(model)``, full_shard, with its own default units."""

    def __init__(self) -> None:
        super().__init__()
        assert dist.group.WORLD is not None
        self._comm = over(dist.group.WORLD)
        self._handles: dict[nn.Module, sw.Sharded] = {}

    def shard(self, model: Model) -> Model:
        handle = sw.shard(model, comm=self._comm)
        self._handles[handle.model] = handle
        return model

    def whole(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in model.state_dict().items()}

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._handles[model].no_sync()

    def clip(self, model: nn.Module, max_norm: float) -> float:
        return float(self._handles[model].clip_grad_norm_(max_norm))

    def full_params(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._handles[model].full_params(writeback=True)

    def forward_method(self, model: nn.Module, name: str) -> None:
        self._handles[model].register_forward_method(model, name)


class Fsdp2(_Ranks):
    """``fully_shard`` on each block and on the model, as its documentation shows."""

    def __init__(self) -> None:
        super().__init__()
        self._mesh = DeviceMesh("cpu", list(range(self.world)))

    def shard(self, model: Model) -> Model:
        for module in model.modules():
            if isinstance(module, Block) and module is not model:
                fully_shard(module, mesh=self._mesh)
        fully_shard(model, mesh=self._mesh)
        return model

    def whole(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: _whole(value).detach() for name, value in model.state_dict().items()}

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        fsdp: Any = model
        fsdp.set_requires_gradient_sync(False)
        yield
        fsdp.set_requires_gradient_sync(True)

    def clip(self, model: nn.Module, max_norm: float) -> float:
        return float(_whole(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))

    @contextmanager
    def full_params(self, model: nn.Module) -> Iterator[None]:
        units: list[Any] = [m for m in model.modules() if hasattr(m, "unshard")]
        for unit in units:
            unit.unshard()
        yield
        for unit in units:
            unit.reshard()

    def forward_method(self, model: nn.Module, name: str) -> None:
        torch.distributed.fsdp.register_fsdp_forward_method(model, name)


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


Engine = Plain | Shardwise | Fsdp2
ENGINES: dict[str, type[Shardwise | Fsdp2]] = {"shardwise": Shardwise, "fsdp2": Fsdp2}
