"""shardwise: fully sharded data-parallel training that can be planned, read and trusted.

One training step is a list of events. Read the package in this order:

    units      model → units: which parameters are gathered together
    layout     unit → slots: which rank owns which range
    schedule   one step as a list of events
    memory     shards, full buckets and gradient buckets: who holds which bytes
    runtime    the user's calls as cues, and the events that answer them
    setup      what is done once per model
    front_door, sharded    ``shard(model)``, and the handle that it returns

and then ``comm`` (how ranks exchange bytes), ``optim`` (what happens on shards), ``checkpoint``
(to disk and back), ``convert`` and ``dialects`` (others' files), ``launch``, ``train``, ``cli``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise import hf, nn, optim
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
    from shardwise.comm.connect import connect
    from shardwise.comm.protocol import Comm
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
    from shardwise.front_door import shard
    from shardwise.offload import Offload
    from shardwise.precision import Precision
    from shardwise.schedule.events import Prefetch
    from shardwise.schedule.placement import Placement
    from shardwise.setup.recompute import ActivationCheckpointing
    from shardwise.sharded import Sharded
    from shardwise.tracing import Recording, Trace, record, trace
    from shardwise.units import wrap

    __version__: str

__all__ = [
    "ActivationCheckpointing",
    "CheckpointError",
    "Comm",
    "ConfigError",
    "DamagedCheckpoint",
    "Loaded",
    "Offload",
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
    "record",
    "shard",
    "trace",
    "wrap",
]


# --- imported when first used: the command line answers `--version` without torch ------------

_DEFINING_MODULES = (
    "errors",
    "schedule.events",
    "schedule.placement",
    "offload",
    "precision",
    "comm.connect",
    "comm.protocol",
    "setup.recompute",
    "front_door",
    "sharded",
    "checkpoint",
    "tracing",
)
_MODULES = {"wrap": "units.wrap", "nn": "nn"}  # in a folder, or of a name that is torch's, too

if not TYPE_CHECKING:  # a type checker would take every name for one that exists

    def __getattr__(name: str) -> object:
        """A public name from its module, or a module of the package."""
        if name == "__version__":
            return import_module("shardwise.version").__version__
        for defining in _DEFINING_MODULES if name in __all__ and name not in _MODULES else ():
            module = import_module(f"shardwise.{defining}")
            if name in vars(module):
                return globals().setdefault(name, getattr(module, name))
        try:
            return import_module(f"shardwise.{_MODULES.get(name, name)}")
        except ModuleNotFoundError as error:
            if error.name != f"shardwise.{name}":
                raise
            raise AttributeError(f"shardwise has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
