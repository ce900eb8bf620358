"""Costs of a step on a recorded device: none is above what was recorded, nor grows with ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import benchmarks
from benchmarks.gpu.recorded import ENGINES, FSDP2, MESHES, row_of
from benchmarks.harness.report import Row, Table, read

RECORD = Path(str(benchmarks.__file__)).parent / "results" / "simulated.json"
OURS = [name for name in ENGINES if name not in FSDP2]
QUICK = ("zero1", "hybrid_full")
FORETOLD = "plan MiB"  # which is no cost
measured = cache(row_of)


@cache
def recorded(world: int) -> dict[str, Row]:
    table = next(table for table in read(RECORD).tables if table.title == f"{world} ranks")
    return {str(row[0]): _cells(table, row) for row in table.rows}


def _cells(table: Table, row: tuple[object, ...]) -> Row:
    names = (column.name for column in table.columns)
    return {n: cell for n, cell in zip(names, row, strict=True) if isinstance(cell, int | float)}


def check(name: str, world: int) -> None:
    """Each number is at most the recorded one: it may only fall."""
    row, most = measured(name, world), recorded(world)[name]
    more = {n: (row[n], most[n]) for n in most if n != FORETOLD and row[n] > most[n] + 1e-6}  # type: ignore[operator]
    assert more == {}


@pytest.mark.parametrize("name", QUICK)
def test_a_cost_may_only_fall(name: str) -> None:
    check(name, world=8)


@pytest.mark.prove
@pytest.mark.parametrize("world", MESHES)
@pytest.mark.parametrize("name", OURS)
def test_so_may_every_other(name: str, world: int) -> None:
    check(name, world)


def test_the_host_waits_for_nothing_and_two_collectives_have_nothing_beside_them() -> None:
    row = measured("full_shard", 8)
    assert (row["waits"], row["clipping"]) == (0, 0)
    assert row["at once"] == 2  # the first gather, and the last sum


def test_launches_do_not_grow_with_the_number_of_ranks() -> None:
    few, many = (measured("full_shard", world) for world in (8, 64))
    assert many["launches"] <= few["launches"]  # type: ignore[operator]


def test_the_peak_is_the_foretold_one_and_activations() -> None:
    row = measured("full_shard", 8)
    peak, plan = row["peak MiB"], row[FORETOLD]
    assert plan < peak < plan + 2  # type: ignore[operator]


@pytest.mark.prove
def test_torchs_own_engine_runs_on_the_same_device() -> None:
    ours, fsdp2 = measured("full_shard", 8), measured("fsdp2", 8)
    assert fsdp2["at once"] == ours["at once"]
    assert ours["launches"] < fsdp2["launches"]  # type: ignore[operator]
    assert ours["reserved"] < fsdp2["reserved"]  # type: ignore[operator]
