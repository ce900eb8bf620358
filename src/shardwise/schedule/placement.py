"""Where parameters, gradients and optimizer state live."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Placement"]


@dataclass(frozen=True)
class Placement:
    """Where parameters, gradients and optimizer state live; nothing else."""

    name: str  # the preset's
    splits: bool  # all ranks split the parameters at rest; else each of them holds a copy
    resident: bool  # the full bucket keeps its memory between uses (its values may be stale)
    frees: bool  # a unit is freed after each use, not only at its last

    @property
    def words(self) -> str:
        return "sharded" if self.splits else "replicated"
