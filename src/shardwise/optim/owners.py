"""Ranks that compute with whole matrices, and what the ranks send each other for that.

Pure numbers. A matrix whose rows lie on several ranks is put together on one of them, its owner,
and what that computes goes back the same way:

    rank 0   | a a a a a b b |     → owner of a     sends its part of b, receives the rest of a
    rank 1   | b b b b b c c |     → owner of b
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Matrix(NamedTuple):
    """A parameter of two dimensions."""

    shape: tuple[int, int]
    parts: tuple[tuple[int, int], ...]  # elements ``[start, stop)`` that each rank holds

    @property
    def cost(self) -> int:
        """Multiplications of one Newton-Schulz iteration: two products with m × m, one of m × n."""
        m, n = sorted(self.shape)
        return m * m * (2 * n + m)

    def held(self, rank: int) -> int:
        """Elements that a rank holds."""
        start, stop = self.parts[rank]
        return stop - start


def owners(matrices: Sequence[Matrix], world: int) -> list[int]:
    """The owner of each matrix: costs are balanced, and the rank that holds most is preferred.

    No rank's cost exceeds the mean by more than the cost of one matrix: the largest come first,
    and none raises the maximum further than the rank with the least would.
    """
    loads, chosen = [0] * world, [0] * len(matrices)
    for at in sorted(range(len(matrices)), key=lambda at: -matrices[at].cost):
        matrix = matrices[at]
        limit = max(*loads, min(loads) + matrix.cost)
        able = [rank for rank in range(world) if loads[rank] + matrix.cost <= limit]
        chosen[at] = min(able, key=lambda rank: (-matrix.held(rank), loads[rank], rank))
        loads[chosen[at]] += matrix.cost
    return chosen


@dataclass(frozen=True)
class Exchange:
    """Matrices with their owners: who sends which elements to whom."""

    matrices: Sequence[Matrix]
    owners: Sequence[int]
    world: int

    @cached_property
    def order(self) -> list[int]:
        """Positions of the matrices in the order in which a rank sends its parts: by owner."""
        return sorted(range(len(self.matrices)), key=self.owners.__getitem__)

    def owned(self, rank: int) -> list[int]:
        """Positions of the matrices that a rank owns."""
        return [at for at in self.order if self.owners[at] == rank]

    @cached_property
    def to_owners(self) -> list[list[int]]:
        """``[r][s]``: elements that rank r sends to rank s, which owns their matrices."""
        sizes = [[0] * self.world for _ in range(self.world)]
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            for rank in range(self.world):
                sizes[rank][owner] += matrix.held(rank)
        return sizes

    @cached_property
    def back(self) -> list[list[int]]:
        """``[r][s]``: elements that rank r sends back to rank s, which holds them."""
        return [list(row) for row in zip(*self.to_owners, strict=True)]
