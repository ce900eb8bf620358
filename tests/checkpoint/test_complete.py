"""A checkpoint is complete when all that its manifest lists is there in full size."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import shardwise as sw
from shardwise.checkpoint.complete import check_complete, read_manifest, saved_in


@pytest.fixture
def run(tmp_path: Path) -> Path:
    sharded = sw.shard(nn.Linear(3, 3))
    for step, metric in ((1, 0.5), (2, None), (10, 0.25)):
        training = sw.Training(step=step, metric=metric)
        sharded.save(tmp_path / f"step-{step}", training=training)
    return tmp_path


def test_the_newest_is_the_one_that_was_saved_last(run: Path) -> None:
    assert saved_in(run).path == run / "step-10"
    assert saved_in(run).skipped == ()
    sw.shard(nn.Linear(3, 3)).save(run / "step-5")  # by a run that went back
    found = [(path.name, made.metric) for path, made in saved_in(run).complete]
    assert found == [("step-5", None), ("step-10", 0.25), ("step-2", None), ("step-1", 0.5)]


def test_broken_ones_are_passed_over_with_the_reason(run: Path) -> None:
    (run / "step-10" / "model.safetensors").write_bytes(b"short")
    (run / "step-2" / "manifest.json").unlink()
    found = saved_in(run)
    assert [path.name for path, _ in found.complete] == ["step-1"]
    reasons = {path.name: reason for path, reason in found.skipped}
    assert "model.safetensors has 5 of 4,144 bytes" in reasons["step-10"]
    assert "step-2 has no manifest.json" in reasons["step-2"]


def test_one_that_a_crash_between_two_renames_left_nameless_counts(run: Path) -> None:
    lost = (run / "step-10").rename(run / "step-10.replaced-0123456789abcdef")
    assert saved_in(run).path == run / "step-10"
    report = sw.shard(nn.Linear(3, 3)).resume(run, training=sw.Training())
    assert report is not None
    assert (report.path, report.step) == (lost, 10)


def test_every_file_that_is_wrong_is_named(run: Path) -> None:
    for name in ("model.safetensors", "training.json"):
        (run / "step-10" / name).unlink()
    with pytest.raises(sw.DamagedCheckpoint) as caught:
        check_complete(run / "step-10")
    for name in ("model.safetensors is missing, ", "training.json is missing, "):
        assert name in str(caught.value)


def test_a_run_that_is_not_there_has_none(tmp_path: Path) -> None:
    assert saved_in(tmp_path / "no").path is None
    assert read_manifest(tmp_path) is None


def test_a_manifest_of_absurd_size_is_not_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.checkpoint import complete

    monkeypatch.setattr(complete, "CAP", 100)
    with pytest.raises(sw.CheckpointError, match="no manifest has more than 100"):
        check_complete(run / "step-1")
