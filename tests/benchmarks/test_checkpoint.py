"""The benchmark itself, on a few megabytes: every method, the right bits, the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.checkpoint import table
from benchmarks.checkpoint.measure import Lap, Measured
from benchmarks.checkpoint.memory import Extra, extra_memory
from benchmarks.checkpoint.methods import METHODS
from benchmarks.checkpoint.report import Report, rows_of
from benchmarks.checkpoint.run import Config, default_folders, run
from benchmarks.checkpoint.state import BYTES, KINDS, Part, Size, drawn, unlike
from benchmarks.checkpoint.traffic import Sent, forget, kind_of, nbytes_of

TINY = 0.004


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Every method, two rounds, two ranks; every load is compared bit by bit on the method."""
    said, kept = list[str](), list[Report]()
    folder = tmp_path_factory.mktemp("saved")
    config = Config(gigabytes=TINY, rounds=2, folders=(folder,), memory=False)
    found = run(config, said.append, kept.append)
    assert kept[-1] == found
    assert list(folder.iterdir()) == []  # nothing is left behind
    return found


# ---- one run -------------------------------------------------------------------------------


@pytest.mark.spawn
def test_every_method_has_all_its_times(report: Report) -> None:
    assert [row.method for row in report.rows] == list(METHODS)
    for row in report.rows:
        later = row.method.endswith("_async")
        assert len(row.times.stall) == len(row.times.save) == len(row.times.load) == 2
        assert len(row.times.alone) == len(row.times.meanwhile) == 2 * later
        assert min(*row.times.stall, *row.times.save, *row.times.load) > 0
        assert all(s <= w for s, w in zip(row.times.stall, row.times.save, strict=True))


@pytest.mark.spawn
def test_all_of_the_state_is_in_the_files(report: Report) -> None:
    state = report.gigabytes * 1e9
    for row in report.rows:
        assert state <= row.nbytes <= 1.5 * state  # names and headers count at this size


@pytest.mark.spawn
def test_what_is_sent_is_counted_by_each_by_its_own_means(report: Report) -> None:
    rows = {row.method: row for row in report.rows}
    for row in rows.values():
        assert row.save_collectives > 0
        assert row.load_collectives > 0
        assert row.save_sent > 0
    state = report.gigabytes * 1e9
    assert rows["ours"].save_sent < 0.1 * state  # edges of pages and short texts
    assert rows["full"].save_sent > 0.3 * state  # half of it goes to rank 0


@pytest.mark.spawn
def test_the_table_tells_every_method_and_every_target(report: Report) -> None:
    text = "\n".join(table.lines(report))
    for name in METHODS:
        assert f"\n{name} " in text
    for target in (
        "save: times faster",
        "load: times faster",
        "stall of ours_async",
        "stall of ours_step_async",
    ):
        assert f"\n{target}" in text
    assert f"digest {report.digest[:12]}" in text


@pytest.mark.spawn
def test_memory_is_watched_while_ranks_save_and_load(tmp_path: Path) -> None:
    found = extra_memory("full", Size(TINY), 2, tmp_path)
    assert set(found) == {"save", "load"}
    assert all(extra.samples > 0 and extra.rank > 0 for extra in found.values())


# ---- the pieces ----------------------------------------------------------------------------


def test_a_state_is_about_as_large_as_was_asked() -> None:
    for gigabytes in (TINY, 0.5):
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
    parts = [Part(kind, "a", 0, value) for kind in ("param", "exp_avg")]
    assert unlike(parts, expected) == []
    value[1] = 0.0  # equal as a number
    assert unlike(parts[:1], expected) == ["param of a", "exp_avg of a"]


def test_a_round_is_as_slow_as_its_slowest_rank() -> None:
    def lap(seconds: float, collectives: int) -> Lap:
        sent = Sent(collectives, 10 * collectives)
        return Lap(seconds, seconds, 0.0, 0.0, seconds, None, 3, sent, sent, nbytes=7)

    ranks = [
        Measured("d", 1, {("tmpfs", "dcp"): [lap(1.0, 1), lap(4.0, 1)]}),
        Measured("d", 1, {("tmpfs", "dcp"): [lap(2.0, 5), lap(3.0, 5)]}),
    ]
    (row,) = rows_of(ranks)
    assert row.times.save == row.times.load == (2.0, 4.0)
    assert (row.times.cold, row.times.alone) == ((), ())
    assert (row.save_collectives, row.save_sent, row.nbytes, row.from_disk) == (5, 50, 7, 6)


@pytest.mark.spawn
def test_targets_are_said_to_be_reached_or_missed(report: Report) -> None:
    rows = list(report.rows)
    memory = Extra(rank=2 * report.bucket, total=4 * report.bucket, samples=9)
    ours, dcp = rows[0], rows[1]
    slow = replace(dcp, times=replace(dcp.times, save=(4.0, 4.0), load=(2.0, 2.0)))
    fast = replace(ours.times, stall=(1.0, 1.0), save=(1.0, 1.0), load=(1.0, 1.0), cold=())
    rows[0] = replace(ours, times=fast, save_memory=memory)
    rows[1] = slow
    told = {line.split("  ")[0]: line for line in table.verdicts(replace(report, rows=(*rows,)))}
    assert told["save: times faster than DCP"].split()[-2:] == ["4.00", "reached"]
    assert told["load: times faster than DCP"].split()[-2:] == ["2.00", "MISSED"]
    assert told["save: memory beyond the state, a rank"].endswith("MISSED")


def test_files_are_measured_and_can_be_forgotten_without_losing_them(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 5_000)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_bytes(b"y" * 7)
    forget(tmp_path)
    assert nbytes_of(tmp_path) == 5_007
    assert (tmp_path / "a").read_bytes() == b"x" * 5_000


def test_a_folder_in_memory_is_used_only_where_there_is_room() -> None:
    assert len(default_folders(1e9)) == 1
    kinds = [kind_of(folder) for folder in default_folders(0.001)]
    assert len(set(kinds)) == len(kinds)
