"""shardwise: fully sharded data-parallel training that can be planned, read and trusted.

One training step is a list of events. Read the package in this order:

    config      what a user says: options, precision, strategies
    plan        what will be done, as values: model → units → slots → one step's events → bytes
    memory      shards, full buckets and gradient buckets: who holds which bytes
    runtime     the user's calls as cues, and the events that answer them
    setup       what is done once per model
    api         ``shard(model)``, and the handle that it returns

and then ``comm`` (how ranks exchange bytes), ``optim`` (what happens on shards), ``checkpoint``
(to disk and back), ``convert`` and ``dialects`` (others' files), ``recipe`` (what a file says),
``launch``, ``train``, ``cli``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise import hf, optim
    from shardwise.api import nn
    from shardwise.api.shard import shard
    from shardwise.api.sharded import Sharded
    from shardwise.checkpoint import (
        Loaded,
        Saved,
        SavedFile,
        Saving,
        StateDict,
        Training,
        by_name,
        numbered,
    )
    from shardwise.comm.machine.connect import connect
    from shardwise.comm.protocol import Comm
    from shardwise.config.checkpointing import ActivationCheckpointing
    from shardwise.config.placement import Placement
    from shardwise.config.precision import Precision
    from shardwise.config.prefetch import Prefetch
    from shardwise.errors import (
        CheckpointError,
        ConfigError,
        DamagedCheckpoint,
        OptimizerError,
        RanksDisagree,
        ScheduleError,
        ShardUseError,
        ShardwiseError,
    )
    from shardwise.outer.diloco import DiLoCo
    from shardwise.plan.forecast.ask import plan
    from shardwise.plan.units import wrap
    from shardwise.tracing import Recording, Trace, record, trace

    __version__: str

__all__ = [
    "ActivationCheckpointing",
    "CheckpointError",
    "Comm",
    "ConfigError",
    "DamagedCheckpoint",
    "DiLoCo",
    "Loaded",
    "OptimizerError",
    "Placement",
    "Precision",
    "Prefetch",
    "RanksDisagree",
    "Recording",
    "Saved",
    "SavedFile",
    "Saving",
    "ScheduleError",
    "ShardUseError",
    "Sharded",
    "ShardwiseError",
    "StateDict",
    "Trace",
    "Training",
    "by_name",
    "connect",
    "hf",
    "nn",
    "numbered",
    "optim",
    "plan",
    "record",
    "shard",
    "trace",
    "wrap",
]


# --- imported when first used: the command line answers `--version` without torch ------------

_DEFINING_MODULES = (
    "errors",
    "config.placement",
    "config.prefetch",
    "config.precision",
    "comm.machine.connect",
    "comm.protocol",
    "config.checkpointing",
    "api.shard",
    "api.sharded",
    "checkpoint",
    "outer.diloco",
    "tracing",
)
_MODULES = {
    "wrap": "plan.units.wrap",
    "nn": "api.nn",
    "plan": "plan",
}  # modules that are public by these names

if not TYPE_CHECKING:  # a type checker would take every name for one that exists

    def __getattr__(name: str) -> object:
        """A public name from its module, or a module of the package."""
        if name == "__version__":
            return import_module("shardwise.config.version").__version__
        for defining in _DEFINING_MODULES if name in __all__ and name not in _MODULES else ():
            module = import_module(f"shardwise.{defining}")
            if name in vars(module):
                return globals().setdefault(name, getattr(module, name))
        try:
            return import_module(f"shardwise.{_MODULES.get(name, name)}")
        except ModuleNotFoundError as error:
            if error.name != f"shardwise.{name}":
                raise
            modes = '; write offload="optimizer" or offload="everything"' * (name == "Offload")
            raise AttributeError(f"shardwise has no attribute {name!r}{modes}") from None


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
