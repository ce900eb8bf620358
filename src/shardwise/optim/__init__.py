"""Optimizers and clipping on shards: what happens between the backward pass and the next step."""

from __future__ import annotations

from shardwise.optim.average import EMA
from shardwise.optim.fused import AdamW
from shardwise.optim.muon import Muon

__all__ = ["EMA", "AdamW", "Muon"]
