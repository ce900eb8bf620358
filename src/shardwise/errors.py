"""Every error that shardwise raises on purpose.

A message says the fact with its numbers, what follows from it, and what to do.

    ShardwiseError
    ├── ConfigError         an argument, a recipe or an environment that cannot work
    ├── ShardUseError       a shard was used as if it were the whole parameter
    ├── OptimizerError      this optimizer would be wrong on shards
    ├── ScheduleError       a step did something that no schedule can serve
    ├── CheckpointError     a checkpoint that cannot be written, read, or made to fit
    │   └── DamagedCheckpoint   its bytes are missing, or not those that were written
    └── RanksDisagree       the ranks do not do the same thing; their group is dead afterwards
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher


class ShardwiseError(Exception):
    """The root of the tree above."""


class ConfigError(ShardwiseError, ValueError):
    """An argument, a recipe or an environment that cannot work."""


class ShardUseError(ShardwiseError, RuntimeError):
    """A shard was used as if it were the whole parameter."""


class OptimizerError(ShardwiseError, TypeError):
    """An optimizer that would be wrong on shards."""


class ScheduleError(ShardwiseError, RuntimeError):
    """A step did something that no schedule can serve."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint that cannot be written, read, or made to fit."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose bytes are missing, or not those that were written."""


class RanksDisagree(ShardwiseError, RuntimeError):
    """The ranks do not do the same thing. Their group cannot be used afterwards."""


def nearest(word: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """The known words most like ``word``, best first, at most ``limit`` of them."""

    def likeness(other: str) -> float:
        return SequenceMatcher(None, word.lower(), other.lower()).ratio()

    return sorted(sorted(known), key=likeness, reverse=True)[:limit]
