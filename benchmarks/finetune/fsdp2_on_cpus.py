"""FSDP2 by transformers' Trainer on CPUs, where accelerate leaves it out."""

from __future__ import annotations

from typing import Any


def force(trainer: Any) -> None:
    """Say what accelerate says itself on a GPU, where it takes the plug-in that Trainer made.

    In 1.15, ``AcceleratorState`` looks at it for GPUs, NPUs, XPUs and others, and not for CPUs.
    """
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    state = trainer.accelerator.state
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    state._shared_state["distributed_type"] = DistributedType.FSDP  # noqa: SLF001
    trainer.is_fsdp_enabled = True
