"""Placement of a unit between steps and in them: a strategy is a placement and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardwise.errors import ConfigError
from shardwise.errors.arguments import checked

AXES = ("shard", "replicate")


@checked
@dataclass(frozen=True)
class Placement:
    """Axes of the mesh over which parameters, gradients and optimizer state are split.

    What is not split over an axis is replicated over it. Each field needs the axes of the one
    before it, since an optimizer can step on no more than it has gradients and parameters of.

        hybrid_full      parameters, gradients                optimizer
        ranks  0  1      | shard 0      | shard 1      |      | piece 0  |  piece 2 |
               2  3      | shard 0      | shard 1      |      | piece 1  |  piece 3 |

    Attributes:
        name: for people; a preset's, or one of your own.
        parameters: within a step: split between uses, and not only between steps.
        gradients: split from one backward pass to the next, so parameters are let go of after each.
        optimizer: split between steps, with the parameters that it steps on.
        hybrid: the mesh has two axes; otherwise all ranks are on ``"shard"``, or on ``"replicate"``
            if nothing is split.
    """

    name: str
    parameters: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()
    hybrid: bool = False

    def __post_init__(self) -> None:
        fields = (self.parameters, self.gradients, self.optimizer)
        unknown = [axis for axes in fields for axis in axes if axis not in AXES]
        nested = set(self.parameters) <= set(self.gradients) <= set(self.optimizer)
        if unknown or not nested:
            few = "shards gradients or the optimizer over too few axes"
            wrong = f"has no axis {unknown[0]!r}" if unknown else few
            raise ConfigError(
                f"placement {self.name!r} {wrong}: parameters={self.parameters}, "
                f'gradients={self.gradients}, optimizer={self.optimizer}. The axes are "shard" and '
                '"replicate"; shard gradients over every axis of parameters, and the optimizer '
                "over every axis of gradients."
            )
        if "replicate" in self.gradients or (self.optimizer == ("replicate",)):
            raise ConfigError(
                f"placement {self.name!r} shards {'gradients' if self.gradients else 'optimizer'} "
                'over "replicate": only the optimizer may be, and only if it is sharded over '
                '"shard" too. To shard everything over all ranks, use strategy="full_shard".'
            )

    @cached_property
    def splits(self) -> bool:
        """Is a parameter split at rest?"""
        return "shard" in self.optimizer

    @cached_property
    def splits_copies(self) -> bool:
        """Is a shard split further at rest, over the ranks that hold copies of it?"""
        return "replicate" in self.optimizer

    @cached_property
    def resident(self) -> bool:
        """Does a full bucket keep its memory between uses, if not its values?"""
        return "shard" not in self.gradients

    @cached_property
    def frees(self) -> bool:
        """Is a unit freed after each use, not only after its last?"""
        return "shard" in self.parameters

    @property
    def words(self) -> str:
        """Name the placement in the table of units."""
        return "sharded" if self.splits else "replicated"
