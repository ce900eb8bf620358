"""Objects of other libraries: settings of FSDP, and models that they placed or wrapped.

Each of them wraps a model in DDP or FSDP itself. Their classes that are here shard it instead, so
one owner is left: what another has done to the model before is an error that names it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwise.api.sharded import Sharded
from shardwise.comm.machine.connect import connect, over
from shardwise.comm.protocol import Comm
from shardwise.dialects import read, shard_arguments
from shardwise.errors import ConfigError

__all__ = [
    "check_own",
    "comm_of",
    "handle",
    "handle_of",
    "launched_settings",
    "owner_of",
    "shard_settings",
    "steps_on",
    "without_fsdp",
]

log = logging.getLogger("shardwise")

_USE_FSDP = "ACCELERATE_USE_FSDP"


def handle_of(model: nn.Module) -> Sharded | None:
    """The handle of a model that ``shard()`` was called on."""
    handle = getattr(model.__dict__.get("__deepcopy__"), "__self__", None)
    return handle if isinstance(handle, Sharded) else None


def handle(model: nn.Module, call: str = "prepare()") -> Sharded:
    """The same; ``ConfigError`` for a model that ``call`` has not sharded yet."""
    sharded = handle_of(model)
    if sharded is None:
        raise ConfigError(f"this {type(model).__name__} is not sharded: {call} it first.")
    return sharded


def comm_of(device: torch.device) -> Comm:
    """One for all models over the process group that a library has made."""
    return _comm(device.type, dist.group.WORLD)


@cache
def _comm(device: str, group: Any) -> Comm:
    return over(group, device) if group else connect(device)


def steps_on(optimizer: Optimizer, model: nn.Module) -> bool:
    """Does ``optimizer`` hold parameters of ``model``?"""
    own = set(map(id, model.parameters()))
    return any(id(param) in own for group in optimizer.param_groups for param in group["params"])


def owner_of(optimizer: Optimizer, models: Sequence[nn.Module]) -> nn.Module:
    """The one of the ``models`` that ``optimizer`` steps on.

    Raises:
        ConfigError: it steps on several, or none.
    """
    owners = [model for model in models if steps_on(optimizer, model)]
    if len(owners) != 1:
        kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
        raise ConfigError(
            f"this {kind} steps on parameters of {len(owners)} of the {len(models)} models that "
            "were prepared, and its state is stored with one of them. Make one optimizer for each "
            "model, of the parameters of that model."
        )
    return owners[0]


def check_own(model: nn.Module, device: torch.device) -> None:
    """Raises ``ConfigError`` for a model that another ``Accelerator`` or ``device_map`` owns."""
    kind = type(model).__name__
    if getattr(model, "_is_accelerate_prepared", False):
        raise ConfigError(
            f"this {kind} was prepared by another Accelerator, and would be prepared twice. Leave "
            "that one's prepare() out; a Trainer prepares its model itself."
        )
    if getattr(model, "is_parallelizable", False) or getattr(model, "model_parallel", False):
        log.warning(
            "is_parallelizable and model_parallel of %s are ignored: they split a model by layers "
            "over the devices of one process, and here each rank has a shard of every layer.",
            kind,
        )
    placed = getattr(model, "hf_device_map", None) or {}
    own = {device.index, str(device)}  # a device is a number there, or a word such as "disk"
    elsewhere = [name or "the model" for name, d in placed.items() if not {d, str(d)} & own]
    if elsewhere:
        raise ConfigError(
            f"device_map put {len(elsewhere)} of {len(placed)} parts of this {kind} elsewhere than "
            f"on {device}, the device of this rank: {', '.join(elsewhere[:3])}. It splits one "
            "model over the devices of one process; here each rank has one device, and a shard of "
            "every part. Leave device_map out."
        )


def shard_settings(settings: Any, dialect: str) -> dict[str, Any]:
    """Settings of FSDP as arguments of ``shard()``; those without effect are logged.

    Raises:
        ConfigError: settings contradict each other.
    """
    report = read(settings, dialect)
    for key, value, status, text in report.entries:
        if status == "ignored":
            log.warning("%s: %s has no effect: %s", key, value, text)
    return shard_arguments(report)


def launched_settings(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of ``accelerate launch`` with a file that asks for FSDP; else none."""
    if environment.get(_USE_FSDP, "false").lower() != "true":
        return {}
    return shard_settings(environment, "environment")


@contextmanager
def without_fsdp() -> Iterator[None]:
    """Keep accelerate from building an FSDP plug-in in the block, whatever its launcher set."""
    before = os.environ.pop(_USE_FSDP, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[_USE_FSDP] = before
