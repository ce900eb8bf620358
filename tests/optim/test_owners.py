"""Who owns which matrix: balanced, near what ranks hold, and pure numbers."""

from __future__ import annotations

import random

import pytest

from shardwise.optim.owners import Exchange, Matrix, owners


def cut(rows: int, columns: int, *cuts: int) -> Matrix:
    """A matrix whose elements are cut at these places, one part for each rank."""
    numel = rows * columns
    starts, stops = [0, *cuts], [*cuts, numel]
    return Matrix((rows, columns), tuple(zip(starts, stops, strict=True)))


def somewhere(world: int, chance: random.Random) -> Matrix:
    rows, columns = chance.randint(1, 40), chance.randint(1, 40)
    cuts = sorted(chance.randint(0, rows * columns) for _ in range(world - 1))
    return cut(rows, columns, *cuts)


def test_the_cost_is_that_of_the_products_with_the_smaller_side_first() -> None:
    """X is m × n with m ≤ n: X Xᵀ is m·n·m, its square m·m·m, and the product with X m·m·n."""
    assert cut(3, 5).cost == cut(5, 3).cost == 3 * 5 * 3 + 3 * 3 * 3 + 3 * 3 * 5


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8, 64])
def test_no_rank_has_more_than_the_mean_and_one_matrix(world: int) -> None:
    chance = random.Random(world)
    for _ in range(30):
        matrices = [somewhere(world, chance) for _ in range(chance.randint(0, 4 * world))]
        loads = [0] * world
        for matrix, owner in zip(matrices, owners(matrices, world), strict=True):
            loads[owner] += matrix.cost
        largest = max((matrix.cost for matrix in matrices), default=0)
        assert max(loads) <= sum(loads) / world + largest


def test_matrices_stay_where_most_of_them_is_if_that_is_balanced() -> None:
    alike = [cut(4, 4, 16, 16), cut(4, 4, 0, 0), cut(4, 4, 3, 12)]
    assert owners(alike, 3) == [0, 2, 1]
    # Rank 0 holds all of each, but may not compute everything.
    assert sorted(owners([cut(4, 4, 16, 16)] * 6, 3)) == [0, 0, 1, 1, 2, 2]


def test_parts_go_to_owners_and_results_the_same_way_back() -> None:
    exchange = Exchange([cut(2, 4, 5), cut(3, 3, 0), cut(1, 6, 6)], owners=[1, 0, 0], world=2)
    assert exchange.order == [1, 2, 0]
    assert exchange.owned(0) == [1, 2]
    assert exchange.to_owners == [[0 + 6, 5], [9 + 0, 3]]
    assert exchange.back == [[6, 9], [5, 3]]


def test_what_is_sent_in_total_is_what_owners_do_not_hold() -> None:
    chance = random.Random(0)
    matrices = [somewhere(3, chance) for _ in range(20)]
    exchange = Exchange(matrices, owners(matrices, 3), 3)
    foreign = sum(
        matrix.held(rank)
        for matrix, owner in zip(matrices, exchange.owners, strict=True)
        for rank in range(3)
        if rank != owner
    )
    for sizes in (exchange.to_owners, exchange.back):
        assert sum(sizes[r][s] for r in range(3) for s in range(3) if r != s) == foreign
