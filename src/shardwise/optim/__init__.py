"""What happens between the backward pass and the next step, on shards."""

from __future__ import annotations

from shardwise.optim.fused import SGD, AdamW

__all__ = ["SGD", "AdamW"]
