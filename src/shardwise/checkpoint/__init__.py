"""Checkpoints: plain safetensors, any number of ranks to any other, never silently wrong.

Read in this order: ``plan`` (which byte is whose), ``save`` and ``load`` (the two acts), ``folder``
(what a run's folder means after a crash), ``points`` (the moments of a save, by name),
``background`` (the same while training goes on).
"""

from __future__ import annotations

from shardwise.checkpoint.background import Saving
from shardwise.checkpoint.fit import Loaded
from shardwise.checkpoint.saving import Saved, SaveOptions
from shardwise.checkpoint.state import Training

__all__ = ["Loaded", "SaveOptions", "Saved", "Saving", "Training"]
