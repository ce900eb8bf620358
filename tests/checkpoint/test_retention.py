"""Which checkpoints of a run stay, and that no good one goes for a damaged one."""

from __future__ import annotations

from datetime import datetime, tzinfo
from pathlib import Path
from typing import Self

import pytest
from torch import nn

import shardwise as sw
from shardwise.checkpoint import retention
from shardwise.checkpoint.complete import Checkpoint, saved_in
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.retention import Retention, moment_of, surplus
from shardwise.comm.protocol import Comm
from tests.copies import on_ranks

NEW, FROM = "published", "resumed from"


def complete(metrics: list[float | None]) -> list[Checkpoint]:
    """The newest first, and just published; it is the last that was resumed from."""
    tokens = [NEW, *(f"token {k}" for k in range(1, len(metrics) - 1)), FROM]
    made = Manifest(
        token="token of it",
        created="2026-11-21T13:05:00.000000+00:00",
        step=None,
        world=1,
        strategy="no_shard",
        versions={},
        aliases={},
        files={},
    )
    return [
        Checkpoint(
            Path(f"step-{9 - k}"), made.model_copy(update={"token": token, "metric": metric})
        )
        for k, (token, metric) in enumerate(zip(tokens, metrics, strict=False))
    ]


@pytest.mark.parametrize(
    ("metrics", "limit", "best", "gone"),
    [
        ([None, None, None], 2, None, [2]),
        ([None, None, None], 1, None, [1, 2]),
        ([None, None, None], 5, None, []),
        ([3.0, 2.0, 1.0], 2, "lowest", [1]),
        ([3.0, 2.0, 1.0], 2, "highest", [2]),
        ([3.0, 2.0, 1.0], 1, "lowest", [1]),  # the newest stays, and the best
        ([1.0, 2.0, 3.0], 1, "lowest", [1, 2]),
        ([None, 2.0, None], 1, "lowest", [2]),
        ([None, None], 1, "highest", [1]),
        ([], 1, "highest", []),
    ],
)
def test_the_newest_stay_and_the_best(
    metrics: list[float | None], limit: int, best: str | None, gone: list[int]
) -> None:
    there = complete(metrics)
    assert surplus(there, Retention(limit, best, [NEW])) == [there[k].path for k in gone]


@pytest.mark.parametrize(
    ("metrics", "limit", "best", "gone"),
    [
        ([None, None, None, None], 1, None, [1, 2]),
        ([None, None, None, None], 2, None, [1, 2]),
        ([None, None, None, None], 3, None, [2]),
        ([None, 1.0, None, None], 1, "lowest", [2]),
    ],
)
def test_what_was_resumed_from_stays_and_counts(
    metrics: list[float | None], limit: int, best: str | None, gone: list[int]
) -> None:
    there = complete(metrics)
    assert surplus(there, Retention(limit, best, [NEW, FROM])) == [there[k].path for k in gone]


# --- runs ------------------------------------------------------------------------------------


def small() -> nn.Module:
    return nn.Linear(4, 4)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def test_a_run_that_went_back_keeps_what_it_saves(tmp_path: Path) -> None:
    sharded = sw.shard(small())
    for step in (4900, 5000):
        sharded.save(tmp_path / f"step-{step}", save_total_limit=2)
    assert sharded.save(tmp_path / "step-1100", save_total_limit=2).removed == ("step-4900",)
    assert sharded.save(tmp_path / "step-1200", save_total_limit=2).removed == ("step-5000",)
    assert names(tmp_path) == ["latest", "step-1100", "step-1200"]
    report = sharded.resume(tmp_path)
    assert report is not None
    assert report.path.name == "step-1200"


def test_a_damaged_one_does_not_take_the_place_of_a_good_one(tmp_path: Path) -> None:
    def rank(comm: Comm, model: nn.Module) -> list[str]:
        sharded = sw.shard(model, comm=comm)
        for step in (100, 200):
            sharded.save(tmp_path / f"step-{step}")
        if comm.rank == 0:
            flip(tmp_path / "step-200" / "model.safetensors")
        taken = []
        for step in (150, 160):
            report = sharded.resume(tmp_path)
            assert report is not None
            taken.append(report.path.name)
            sharded.save(tmp_path / f"step-{step}", save_total_limit=1)
        return taken

    assert on_ranks(2, small, rank) == 2 * [["step-100", "step-150"]]
    # step-100 stayed as long as the run went on from it
    assert names(tmp_path) == ["broken-step-200-1", "latest", "step-150", "step-160"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_a_clock_that_is_behind_does_not_make_a_new_one_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded = sw.shard(small())
    sharded.save(tmp_path / "step-1")

    class Behind(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls(1970, 1, 1, tzinfo=tz)

    monkeypatch.setattr(retention, "datetime", Behind)
    sharded.save(tmp_path / "step-2", save_total_limit=1)
    assert names(tmp_path) == ["latest", "step-2"]
    sharded.save(tmp_path / "step-3")
    assert saved_in(tmp_path).path == tmp_path / "step-3"
    assert moment_of(tmp_path / "model") == "1970-01-01T00:00:00.000000+00:00"


def test_where_one_cannot_be_read_none_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sharded = sw.shard(small())
    for step in (1, 2):
        sharded.save(tmp_path / f"step-{step}")
    manifest = tmp_path / "step-2" / "manifest.json"
    later = manifest.read_text().replace('"version": 1', '"version": 2')
    manifest.write_text(later)
    assert sharded.save(tmp_path / "step-3", save_total_limit=1).removed == ()
    assert "no old checkpoint of" in caplog.text
    assert names(tmp_path) == ["latest", "step-1", "step-2", "step-3"]
