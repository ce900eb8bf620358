"""Checkpoints: plain safetensors, any number of ranks to any other, never silently wrong.

Read in this order: ``plan`` (which byte is whose), ``save`` and ``load`` (the two acts), ``folder``
(what a run's folder means after a crash), ``points`` (the moments of a save, by name),
``background`` (the same while training goes on), ``kinds`` (state dicts, as FSDP's users know
them), ``one_file`` (one file), ``dcp`` (formats of others).
"""

from __future__ import annotations

from shardwise.checkpoint.background import Saving
from shardwise.checkpoint.fit import Loaded
from shardwise.checkpoint.kinds import StateDict
from shardwise.checkpoint.one_file import SavedFile
from shardwise.checkpoint.optimizer_dict import by_name, numbered
from shardwise.checkpoint.saving import Saved, SaveOptions
from shardwise.checkpoint.state import Training

__all__ = [
    "Loaded",
    "SaveOptions",
    "Saved",
    "SavedFile",
    "Saving",
    "StateDict",
    "Training",
    "by_name",
    "numbered",
]
