"""shardwise: fully sharded data-parallel training that can be planned, read and trusted."""

from __future__ import annotations

__all__: list[str] = []
