"""shardwise: fully sharded data-parallel training that can be planned, read and trusted.

One training step is a list of events. Read the package in this order:

    units      model → units: which parameters are gathered together
    layout     unit → buckets → slots: who owns which range
    order      the order in which units run
    schedule   one step as a list of events
    buffers    the only owner of big memory
    hooks      what the user's code does, as cues
    runtime    a cursor along the events
    shard      the front door

and then ``comm`` (how ranks talk), ``optim`` (what happens on shards), ``checkpoint`` (to disk and
back) and ``train``.
"""

from __future__ import annotations

from importlib.metadata import version

from shardwise import optim, wrap
from shardwise.checkpoint import (
    Loaded,
    Saved,
    SavedFile,
    Saving,
    StateDict,
    Training,
    by_name,
    join,
    numbered,
)
from shardwise.comm.connect import connect
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
from shardwise.precision import Precision
from shardwise.schedule import Prefetch
from shardwise.shard import Sharded, shard

__version__ = version("shardwise")

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DamagedCheckpoint",
    "Loaded",
    "OptimizerError",
    "Precision",
    "Prefetch",
    "RanksDisagree",
    "Saved",
    "SavedFile",
    "Saving",
    "ScheduleError",
    "ShardUseError",
    "Sharded",
    "ShardwiseError",
    "StateDict",
    "Training",
    "by_name",
    "connect",
    "join",
    "numbered",
    "optim",
    "shard",
    "wrap",
]
