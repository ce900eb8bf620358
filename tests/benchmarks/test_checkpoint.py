"""The checkpoint benchmark on a few megabytes: every method, the right bits, the tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.checkpoint.measure import Lap, extra_memory, forget, kind_of
from benchmarks.checkpoint.methods import METHODS, is_async
from benchmarks.checkpoint.run import Config, row_of, run, tables_of
from benchmarks.checkpoint.trained import BYTES, KINDS, Size, drawn, unlike
from benchmarks.harness.report import Cell, Report, Row

TINY = 0.001
Rows = dict[str, dict[str, Cell]]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Every method, one round, two ranks; every load is compared bit by bit on the method."""
    folder = tmp_path_factory.mktemp("saved")
    config = Config(gigabytes=TINY, rounds=1, folder=str(folder), part=("time",))
    (report,) = run(config, lambda _: None)
    assert list(folder.iterdir()) == []  # nothing is left behind
    return report


@pytest.fixture(scope="module")
def rows(report: Report) -> Rows:
    """Method → column → number."""
    return {
        str(cells[0]): dict(zip((column.name for column in table.columns), cells, strict=True))
        for table in report.tables
        for cells in table.rows
    }


def number(cell: Cell) -> float:
    assert isinstance(cell, float | int)
    return cell


# ---- one run -------------------------------------------------------------------------------


@pytest.mark.prove
@pytest.mark.spawn
def test_every_method_has_all_its_times(rows: Rows) -> None:
    assert list(rows) == list(METHODS)
    for name, row in rows.items():
        columns = ["stall ms", "durable s"] if is_async(name) else ["save s", "load s"]
        if name == "plain":  # nothing is loaded
            columns.remove("load s")
        assert all(number(row[column]) > 0 for column in columns)


@pytest.mark.spawn
def test_all_of_the_state_is_in_the_files(rows: Rows) -> None:
    for row in (row for name, row in rows.items() if not is_async(name)):
        assert TINY <= number(row["GB on disk"]) <= 2 * TINY  # one block, names and headers


@pytest.mark.prove
@pytest.mark.spawn
def test_memory_is_watched_while_ranks_save_and_load(tmp_path: Path) -> None:
    large = Size(0.005)  # more than a forked process may have free on its heap
    extra = extra_memory("full", large, 2, tmp_path)
    assert set(extra) == {"save", "load"}
    assert all(nbytes > 0 for nbytes in extra.values())


# ---- the pieces ----------------------------------------------------------------------------


def test_a_state_is_about_as_large_as_was_asked() -> None:
    for gigabytes in (0.004, 0.5):
        with torch.device("meta"):
            model = Size(gigabytes).new_model()
        params = sum(param.numel() for param in model.parameters())
        assert BYTES * params == pytest.approx(gigabytes * 1e9, rel=0.2)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_follow_from_their_place_however_a_tensor_is_cut(kind: str) -> None:
    whole = drawn(kind, "a.weight", 0, 1_000)
    halves = drawn(kind, "a.weight", 0, 300), drawn(kind, "a.weight", 300, 1_000)
    assert torch.equal(torch.cat(halves), whole)
    assert not torch.equal(drawn(kind, "b.weight", 0, 1_000), whole)
    assert len(whole.unique()) > 990
    assert 0 <= whole.min() <= whole.max() <= KINDS[kind]


def test_one_bit_that_differs_is_found_and_so_is_what_is_absent() -> None:
    value = torch.tensor([1.0, -0.0])
    expected = {("param", "a"): value.clone(), ("exp_avg", "a"): value.clone()}
    values = dict.fromkeys(expected, value)
    assert unlike(values, expected) == []
    value[1] = 0.0  # equal as a number
    del values["exp_avg", "a"]
    assert unlike(values, expected) == ["param of a", "exp_avg of a"]


def test_a_round_is_as_slow_as_its_slowest_rank() -> None:
    def lap(seconds: float) -> Lap:
        return Lap(seconds, seconds, seconds, 7, alone=1.0)

    ranks = [[lap(1.0), lap(4.0), lap(1.0)], [lap(2.0), lap(3.0), lap(3.0)]]
    assert row_of(ranks) == {
        "save s": 3.0,
        "load s": 3.0,
        "GB on disk": 7e-9,
        "stall ms": 3000.0,
        "durable s": 3.0,
        "steps ×": 0.0,
        "lost ms": 2000.0,
    }


def test_tables_say_what_ours_missed() -> None:
    ours: Row = {"save s": 1.0, "load s": 1.0, "MiB to save": 2.0}
    rows: dict[str, Row] = {
        "ours": ours,
        "dcp": {"save s": 4.0, "load s": 2.0},
        "ours_async": {"save s": 2.0, "stall ms": 60.0},
    }
    sync, early = tables_of("2 ranks, ext4", rows, bucket=1.0)
    assert sync.remarks == (
        "ours: load ÷ 0.500, at most 0.333 wanted; MiB to save 2, at most 1 wanted",
    )
    assert early.remarks == ("ours_async: ÷ its sync 0.060, at most 0.050 wanted",)


def test_files_can_be_forgotten_without_losing_them(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_bytes(b"x" * 5_000)
    forget(tmp_path)
    assert (tmp_path / "b" / "c").read_bytes() == b"x" * 5_000
    assert kind_of(Path("/proc/self")) == "proc"
