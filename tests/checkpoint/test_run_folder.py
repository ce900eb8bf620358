"""Which checkpoints of a run are complete, which stay, and what a crash left."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Self

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import publish
from shardwise.checkpoint.folder import Partial, resolve
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.reader import CheckpointReader
from shardwise.checkpoint.recognise import CHECKPOINTS
from shardwise.checkpoint.run_folder import (
    Checkpoint,
    Retention,
    check_complete,
    expired,
    read_manifest,
    saved_in,
)
from shardwise.cli.runs import checkpoint_of, folder_of_run, meant, survey
from shardwise.comm.protocol import Comm
from shardwise.convert.export import export
from tests.checkpoint.runs import names, saved
from tests.copies import on_ranks
from tests.nets import NETS


@pytest.fixture
def damaged_run(tmp_path: Path) -> Path:
    sharded = sw.shard(nn.Linear(3, 3))
    for step, metric in ((1, 0.5), (2, None), (10, 0.25)):
        training = sw.Training(step=step, metric=metric)
        sharded.save(tmp_path / f"step-{step}", training=training)
    return tmp_path


def test_the_newest_is_the_one_that_was_saved_last(damaged_run: Path) -> None:
    assert saved_in(damaged_run).complete[0].path == damaged_run / "step-10"
    assert saved_in(damaged_run).skipped == ()
    sw.shard(nn.Linear(3, 3)).save(damaged_run / "step-5")  # by a run that went back
    metrics = [(path.name, made.metric) for path, made in saved_in(damaged_run).complete]
    assert metrics == [("step-5", None), ("step-10", 0.25), ("step-2", None), ("step-1", 0.5)]


def test_broken_ones_are_passed_over_with_the_reason(damaged_run: Path) -> None:
    (damaged_run / "step-10" / "model.safetensors").write_bytes(b"short")
    (damaged_run / "step-2" / "manifest.json").unlink()
    listing = saved_in(damaged_run)
    assert [path.name for path, _ in listing.complete] == ["step-1"]
    reasons = {path.name: reason for path, reason in listing.skipped}
    assert "model.safetensors has 5 of 4,144 bytes" in reasons["step-10"]
    assert "step-2 has no manifest.json" in reasons["step-2"]


def test_one_that_a_crash_between_two_renames_left_nameless_counts(damaged_run: Path) -> None:
    lost = (damaged_run / "step-10").rename(damaged_run / "step-10.replaced-0123456789abcdef")
    assert saved_in(damaged_run).complete[0].path == damaged_run / "step-10"
    report = sw.shard(nn.Linear(3, 3)).resume(damaged_run, training=sw.Training())
    assert report is not None
    assert (report.path, report.step) == (lost, 10)


def test_a_run_that_is_not_there_has_none(tmp_path: Path) -> None:
    assert saved_in(tmp_path / "no").complete == ()
    assert read_manifest(tmp_path) is None


def test_a_manifest_of_absurd_size_is_not_read(
    damaged_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwise.checkpoint import run_folder

    monkeypatch.setattr(run_folder, "CAP", 100)
    with pytest.raises(sw.CheckpointError, match="no manifest has more than 100"):
        check_complete(damaged_run / "step-1")


NEW, FROM = "published", "resumed from"


def complete(metrics: list[float | None]) -> list[Checkpoint]:
    """The newest first, and just published; it is the last that was resumed from."""
    tokens = [NEW, *(f"token {k}" for k in range(1, len(metrics) - 1)), FROM]
    manifest = Manifest(
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
            Path(f"step-{9 - k}"), manifest.model_copy(update={"token": token, "metric": metric})
        )
        for k, (token, metric) in enumerate(zip(tokens, metrics, strict=False))
    ]


@pytest.mark.parametrize(
    ("metrics", "limit", "best", "removed"),
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
    metrics: list[float | None], limit: int, best: str | None, removed: list[int]
) -> None:
    checkpoints = complete(metrics)
    assert expired(checkpoints, Retention(limit, best, [NEW])) == [
        checkpoints[k].path for k in removed
    ]


@pytest.mark.parametrize(
    ("metrics", "limit", "best", "removed"),
    [
        ([None, None, None, None], 1, None, [1, 2]),
        ([None, None, None, None], 2, None, [1, 2]),
        ([None, None, None, None], 3, None, [2]),
        ([None, 1.0, None, None], 1, "lowest", [2]),
    ],
)
def test_what_was_resumed_from_stays_and_counts(
    metrics: list[float | None], limit: int, best: str | None, removed: list[int]
) -> None:
    checkpoints = complete(metrics)
    assert expired(checkpoints, Retention(limit, best, [NEW, FROM])) == [
        checkpoints[k].path for k in removed
    ]


# --- runs ------------------------------------------------------------------------------------


def small() -> nn.Module:
    return nn.Linear(4, 4)


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
        resumed = []
        for step in (150, 160):
            report = sharded.resume(tmp_path)
            assert report is not None
            resumed.append(report.path.name)
            sharded.save(tmp_path / f"step-{step}", save_total_limit=1)
        return resumed

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

    monkeypatch.setattr(publish, "datetime", Behind)
    sharded.save(tmp_path / "step-2", save_total_limit=1)
    assert names(tmp_path) == ["latest", "step-2"]
    sharded.save(tmp_path / "step-3")
    assert saved_in(tmp_path).complete[0].path == tmp_path / "step-3"
    sharded.save(tmp_path / "final")
    assert saved_in(tmp_path).complete[0].path == tmp_path / "final"
    assert publish.moment_of(tmp_path / "other" / "model") == "1970-01-01T00:00:00.000000+00:00"


def test_at_the_end_of_all_clocks_the_highest_step_is_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AtTheEnd(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls(9999, 12, 31, 23, 59, 59, 999999, tzinfo=tz)

    monkeypatch.setattr(publish, "datetime", AtTheEnd)
    sharded = sw.shard(small())
    for step, name in ((3, "b"), (10, "a"), (2, "c")):
        sharded.save(tmp_path / name, training=sw.Training(step=step))
    assert [path.name for path, _ in saved_in(tmp_path).complete] == ["a", "b", "c"]


def test_any_name_counts_in_a_run(tmp_path: Path) -> None:
    """Resumed from, listed and removed are what was saved last, by its manifest."""
    model = small()
    sharded, optimizer = sw.shard(model), torch.optim.SGD(model.parameters(), lr=0.1)
    run = tmp_path / "run"
    for step, name in enumerate(("step-00000001", "ckpt_100", "epoch-3", "final"), start=1):
        sharded.save(run / name, optimizer, sw.Training(step=step), save_total_limit=2)
    assert names(run) == ["epoch-3", "final", "latest"]
    assert str((run / "latest").readlink()) == "final"
    report = sharded.resume(run, optimizer, sw.Training())
    assert report is not None
    assert (report.path.name, report.step) == ("final", 4)
    assert [(one.name, one.step) for one in survey(run).checkpoints] == [
        ("final", 4),
        ("epoch-3", 3),
    ]
    assert folder_of_run(run) == run
    assert sharded.load(run / "latest").path == run / "final"


def test_a_damaged_one_of_any_name_is_passed_over_and_marked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sharded = sw.shard(small())
    for name in ("epoch-1", "epoch-2", "epoch-3"):
        sharded.save(tmp_path / name, training=sw.Training())
    (tmp_path / "epoch-3" / "manifest.json").write_bytes(b"{")
    (tmp_path / "epoch-2" / "model.safetensors").write_bytes(b"")
    report = sharded.resume(tmp_path)
    assert report is not None
    assert report.path.name == "epoch-1"
    assert names(tmp_path) == ["broken-epoch-2-1", "broken-epoch-3-1", "epoch-1", "latest"]
    assert sum("SKIPPED" in text for text in caplog.messages) == 2


@pytest.mark.parametrize("name", ["latest", ".hidden", "broken-step-1-1"])
def test_a_name_that_no_resume_would_take_is_refused_at_save(tmp_path: Path, name: str) -> None:
    with pytest.raises(sw.CheckpointError, match="cannot be called"):
        sw.shard(small()).save(tmp_path / name)
    assert names(tmp_path) == []


def test_where_latest_is_a_folder_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(sw.CheckpointError, match="latest is a folder, and the link"):
        sw.shard(small()).save(tmp_path / "step-1")
    assert names(tmp_path) == ["latest"]


def test_a_checkpoint_in_a_checkpoint_makes_it_no_run(tmp_path: Path) -> None:
    sharded = sw.shard(small())
    sharded.save(tmp_path / "step-1")
    sharded.save(tmp_path / "step-1" / "ema", save_total_limit=1)
    assert names(tmp_path / "step-1") == ["ema", "manifest.json", "model.safetensors"]
    with pytest.raises(sw.CheckpointError, match="is a checkpoint, and resume"):
        sharded.resume(tmp_path / "step-1")


@pytest.mark.parametrize("name", ["run/pytorch_model.bin", "run/step/0.pt", "run/dcp/0.distcp"])
def test_resume_says_why_it_takes_no_pickle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_bytes(b"a pickle")
    assert sw.shard(small()).resume(tmp_path / "run") is None
    (warning,) = [text for text in caplog.messages if "nothing was resumed" in text]
    assert f"{(tmp_path / name).parent.name} in {tmp_path / 'run'} holds weights" in warning
    assert "`shardwise export` converts pickles" in warning


@pytest.mark.parametrize("where", ["export", "hf", "broken-step-1-1", "inner", "itself"])
def test_resume_says_why_it_takes_none_of_the_weights_that_are_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    sharded, run = sw.shard(small()), tmp_path / "run"
    sharded.save(run / CHECKPOINTS / "step-1" if where == "inner" else tmp_path / "step-1")
    if where == "export":
        with CheckpointReader.open(tmp_path / "step-1") as source:
            export(source, run / "weights")
    elif where != "inner":
        place = run if where == "itself" else run / where
        place.mkdir(parents=True)
        (tmp_path / "step-1" / "model.safetensors").rename(place / "model.safetensors")
    caplog.clear()
    assert sharded.resume(run) is None
    (warning,) = [text for text in caplog.messages if "nothing was resumed" in text]
    assert ("resume that folder" in warning) == (where == "inner")
    assert {"export": "weights", "inner": CHECKPOINTS, "itself": "run"}.get(where, where) in warning


def test_a_run_that_is_new_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "logs").mkdir()
    assert sw.shard(small()).resume(tmp_path) is None
    assert sw.shard(small()).resume(tmp_path / "absent") is None
    assert not [text for text in caplog.messages if "resumed" in text]


def test_of_a_link_to_a_checkpoint_only_the_link_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sharded, run = sw.shard(small()), tmp_path / "run"
    sharded.save(tmp_path / "elsewhere" / "step-1")
    run.mkdir()
    (run / "step-1").symlink_to("../elsewhere/step-1")
    sharded.save(run / "step-2", save_total_limit=1)
    assert names(run) == ["latest", "step-2"]
    assert "which stays" in caplog.text
    (run / "step-3").symlink_to("../elsewhere/step-1")
    sharded.save(run / "step-3")
    assert not (run / "step-3").is_symlink()
    assert names(run) == ["latest", "step-2", "step-3"]
    assert names(tmp_path / "elsewhere" / "step-1") == ["manifest.json", "model.safetensors"]


def test_where_one_cannot_be_read_none_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sharded = sw.shard(small())
    for step in (1, 2):
        sharded.save(tmp_path / f"step-{step}")
    manifest = tmp_path / "step-2" / "manifest.json"
    later = manifest.read_text().replace('"version": 2', '"version": 3')
    manifest.write_text(later)
    assert sharded.save(tmp_path / "step-3", save_total_limit=1).removed == ()
    assert "no old checkpoint of" in caplog.text
    assert names(tmp_path) == ["latest", "step-1", "step-2", "step-3"]


TOKEN = "0123456789abcdef"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two whole checkpoints and a third that lost its manifest, the newest."""
    saved(NETS[1], 2, tmp_path / "step-2")
    saved(NETS[1], 1, tmp_path / "step-10", strategy="no_shard")
    saved(NETS[1], 1, tmp_path / "step-11")
    (tmp_path / "step-11" / "manifest.json").unlink()
    return tmp_path


def test_checkpoints_are_listed_newest_first_with_who_wrote_them(run: Path) -> None:
    listing = survey(run)
    assert [listed.path.name for listed in listing.checkpoints] == ["step-11", "step-10", "step-2"]
    broken, ten, two = listing.checkpoints
    assert (broken.step, broken.manifest) == (11, None)
    assert "step-11 has no manifest.json" in broken.problem
    assert ten.manifest is not None
    assert (ten.manifest.world, ten.manifest.strategy, ten.problem) == (1, "no_shard", "")
    files = (file for file in (run / "step-2").rglob("*") if file.is_file())
    assert two.nbytes == sum(file.stat().st_size for file in files)
    assert (listing.latest, listing.leftovers) == ("step-11", ())


@pytest.mark.parametrize("link", ["../elsewhere", "", "x" * 10_000, "\udcff"])
def test_whatever_latest_says_the_run_is_listed(run: Path, link: str) -> None:
    (run / "latest").unlink()
    (run / "latest").write_bytes(link.encode(errors="surrogateescape"))
    listing = survey(run)
    assert len(listing.checkpoints) == 3
    assert listing.latest == link[:4096].replace("\udcff", "\ufffd")
    with pytest.raises(sw.CheckpointError, match="latest"):
        resolve(run / "latest")


def test_a_file_that_is_cut_off_is_the_reason_why(run: Path) -> None:
    os.truncate(run / "step-2" / "model.safetensors", 100)
    problem = survey(run).checkpoints[2].problem
    assert "model.safetensors has 100 of" in problem


def test_what_is_being_written_is_told_from_what_a_crash_left(run: Path) -> None:
    written = Partial.make(run / "step-20", TOKEN)
    Partial.make(run / "step-21", TOKEN).lock.close()  # as a process does that dies
    (run / f"step-1.removing-{TOKEN}").mkdir()
    leftovers = survey(run).leftovers
    written.lock.close()
    assert [(one.kind, one.name, now) for one, now in leftovers] == [
        ("removing", "step-1", False),
        ("partial", "step-20", True),
        ("partial", "step-21", False),
    ]


@pytest.mark.parametrize("inner", ["", "checkpoints"])
def test_a_run_is_a_folder_with_checkpoints_in_it(tmp_path: Path, inner: str) -> None:
    saved(NETS[1], 1, tmp_path / inner / "step-1")
    (tmp_path / "model.safetensors").touch()  # a run leaves the trained model beside them
    assert folder_of_run(tmp_path) == tmp_path / inner
    assert folder_of_run(tmp_path / inner / "step-1") is None
    assert folder_of_run(tmp_path / "nothing") is None
    assert folder_of_run(tmp_path / "model.safetensors") is None


def test_the_newest_whole_checkpoint_stands_for_its_run(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "shardwise"):
        assert checkpoint_of(run) == run / "step-10"
    assert f"SKIPPED {run / 'step-11'}" in caplog.text
    assert checkpoint_of(run / "step-2") == run / "step-2"


def test_a_run_without_a_whole_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    with pytest.raises(sw.CheckpointError, match=r"holds no complete checkpoint: 1 are broken"):
        checkpoint_of(tmp_path)


def test_a_checkpoint_that_may_not_be_looked_at_does_not_hide_the_others(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:
        if path.name == "step-10":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    _, ten, two = survey(run).checkpoints
    assert "may not do that there" in ten.problem
    assert (ten.nbytes, two.problem) == (0, "")


def test_a_checkpoint_that_a_crash_left_without_its_name_is_listed(tmp_path: Path) -> None:
    saved(NETS[1], 1, tmp_path / "step-6")
    (tmp_path / "step-6").rename(tmp_path / f"step-6.replaced-{TOKEN}")
    (listed,) = survey(tmp_path).checkpoints
    assert (listed.name, listed.step, listed.problem) == ("step-6", 2, "")
    assert listed.path.name == f"step-6.replaced-{TOKEN}"


def test_a_checkpoint_is_found_by_its_run(tmp_path: Path) -> None:
    inner = tmp_path / "run" / "checkpoints"
    saved(NETS[1], 1, inner / "step-1")
    assert meant(tmp_path / "run" / "step-1") == inner / "step-1"
    assert checkpoint_of(tmp_path / "run" / "latest") == inner / "latest"
    assert meant(inner / "step-1") == inner / "step-1"
    assert meant(tmp_path / "run" / "other") == tmp_path / "run" / "other"
    (tmp_path / "run" / "step-1").mkdir()
    assert meant(tmp_path / "run" / "step-1") == tmp_path / "run" / "step-1"
