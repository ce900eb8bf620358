"""Every error that shardwise raises on purpose.

A message says the fact with its numbers, what follows from it, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher


class ShardwiseError(Exception):
    """The base class of all of them."""


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
