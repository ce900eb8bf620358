"""A strategy of Lightning Fabric that shards models in place of DDP and FSDP.

    Fabric(strategy=ShardwiseStrategy(sharding={"strategy": "shard_grad_op"}), devices=2)

It starts processes and their group as Fabric's DDP does; ``setup`` shards the model in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_fabric.strategies.ddp import DDPStrategy
from lightning_fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.api.shard import shard
from shardwise.api.sharded import Sharded
from shardwise.checkpoint import numbered
from shardwise.integrations.handover import comm_of, handle, handle_of, owner_of

__all__ = ["ShardwiseStrategy"]

CALL = "fabric.setup()"
STEPS = "training_step", "validation_step", "test_step", "predict_step"  # as Lightning names them


class ShardwiseStrategy(DDPStrategy):
    """Fabric's processes, with models sharded by ``shard()``.

    Args:
        sharding: arguments of ``shard()``.
        options: what ``DDPStrategy`` takes.
    """

    def __init__(self, sharding: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.sharding = dict(sharding or {})
        self._backward_sync_control = _Accumulation()
        self._models: list[Sharded] = []

    def module_to_device(self, module: nn.Module) -> None:
        """Leave the module where it is until it is sharded: the unsharded model may not fit."""

    def setup_module(self, module: nn.Module) -> Any:
        """Shard ``module`` in place. A collective."""
        sharded = handle_of(module)
        if sharded is None:
            sharded = shard(module, comm=comm_of(self.root_device), **self.sharding)
        self._models.append(sharded)
        for name in STEPS:  # Fabric leads calls of them through forward, of a module that it wraps
            if callable(getattr(module, name, None)):
                sharded.register_forward_method(module, name)
        return module

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any | Tensor]:
        """Whole tensors on rank 0, nothing elsewhere. A collective."""
        return handle(module, CALL).state_dict(rank0_only=True)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Whole state on rank 0, as a plain optimizer keeps it. A collective."""
        owner = handle(owner_of(optimizer, [sharded.model for sharded in self._models]), CALL)
        states = owner.optimizer_state_dict(optimizer, rank0_only=True)
        return numbered(states) if states else {}


class _Accumulation(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return handle(module, CALL).no_sync() if enabled else nullcontext()
