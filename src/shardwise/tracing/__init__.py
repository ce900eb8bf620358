"""The step of a sharded module, to be read: as programs before it runs, recorded while it runs."""

from __future__ import annotations

from shardwise.tracing.recording import Recording, record
from shardwise.tracing.stages import Ran, Stage, Trace, trace

__all__ = ["Ran", "Recording", "Stage", "Trace", "record", "trace"]
