"""Checkpoints: plain safetensors, any number of ranks to any other, never silently wrong.

Read in this order: ``plan`` (which byte is whose), ``save`` and ``load`` (the two acts), ``folder``
(what a run's folder means after a crash), ``failpoints`` (the moments of a save, by name),
``background`` (the same while training goes on), ``state_dict`` (as FSDP's users know them),
``one_file`` (one file). ``api`` has the methods of ``Sharded``.
"""

from __future__ import annotations

from shardwise.checkpoint.background import Saving
from shardwise.checkpoint.one_file import SavedFile
from shardwise.checkpoint.optimizer_state_dict import by_name, numbered
from shardwise.checkpoint.options import Loaded, Saved, SaveOptions
from shardwise.checkpoint.state_dict import StateDict
from shardwise.checkpoint.training_state import Training

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
