from __future__ import annotations

import errno
import shutil
import uuid
from pathlib import Path

import pytest
from torch import nn

import shardwise as sw
from shardwise.checkpoint.remote import download, remote_checkpoints
from shardwise.comm.transports import threads
from shardwise.errors import ConfigError
from shardwise.recipe.recipe import CheckpointConfig
from shardwise.train.loop import train
from shardwise.train.mirror import Mirror, Mirrored
from shardwise.train.records import Record, Resumed
from tests.train.test_loop import losses
from tests.train.tiny import tiny_recipe


def run(folder: Path, *overrides: str) -> list[Record]:
    records: list[Record] = []
    recipe = tiny_recipe(folder, "--checkpoint.save_every=2", *overrides)
    threads.run(2, lambda comm: train(recipe, comm, records.append))
    return records


def test_a_run_goes_on_from_its_mirror_where_its_folder_is_gone(tmp_path: Path) -> None:
    url = f"memory://{uuid.uuid4()}/run"
    options = [f"--checkpoint.mirror={url}", "--checkpoint.kind=full"]
    first = run(tmp_path, *options)
    assert [r.url for r in first if isinstance(r, Mirrored)] == [f"{url}/step-2", f"{url}/step-4"]
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    (tmp_path / "run").rename(tmp_path / "kept")
    again = run(tmp_path, *options, "--run.steps=6")
    straight = run(tmp_path, f"--run.folder={tmp_path}/kept", "--run.steps=6")
    assert [r.step for r in again if isinstance(r, Resumed)] == [4]
    assert losses(again)[-2:] == losses(straight)[-2:]
    assert remote_checkpoints(url)[0].manifest.step == 6


@pytest.mark.parametrize("died", ["downloading", "before its first step"])
def test_a_run_that_died_when_it_had_begun_to_fetch_goes_on_by_the_same_command(
    died: str, tmp_path: Path
) -> None:
    url, fetched = f"memory://{uuid.uuid4()}/run", tmp_path / "run" / "checkpoints"
    run(tmp_path, f"--checkpoint.mirror={url}")
    shutil.rmtree(tmp_path / "run")
    if died == "downloading":
        (fetched / ".step-4.0123abcd.download").mkdir(parents=True)
        (fetched / ".step-2.mirror").mkdir()  # links of what it was uploading before
    else:
        download(url, fetched)
    again = run(tmp_path, f"--checkpoint.mirror={url}", "--run.steps=6")
    assert [r.step for r in again if isinstance(r, Resumed)] == [4]
    assert not list(fetched.glob(".*"))


def test_another_run_is_refused_at_the_mirror_of_this_one_whatever_its_folder(
    tmp_path: Path,
) -> None:
    url = f"memory://{uuid.uuid4()}/run"
    run(tmp_path, f"--checkpoint.mirror={url}")
    for number in (1, 2, 2):
        with pytest.raises(ConfigError, match="name another checkpoint\\.mirror"):
            run(tmp_path / str(number), f"--checkpoint.mirror={url}", "--run.seed=77")


def test_a_run_that_is_to_be_replaced_is_not_fetched_again(tmp_path: Path) -> None:
    options = [f"--checkpoint.mirror=memory://{uuid.uuid4()}/run", "--run.overwrite=true"]
    run(tmp_path, *options)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert not [r for r in run(tmp_path, *options) if isinstance(r, Resumed)]


def test_of_those_that_wait_the_newest_is_uploaded_though_it_was_removed_meanwhile(
    tmp_path: Path,
) -> None:
    url = f"memory://{uuid.uuid4()}/run"
    mirror = Mirror(url, None)
    for step in (1, 2, 3):
        saved = sw.shard(nn.Linear(3, 3)).save(tmp_path / f"step-{step}")
        mirror.add(saved.path)
        shutil.rmtree(saved.path)
    assert mirror.take(wait=True)[-1].url == f"{url}/step-3"
    assert mirror.take() == []
    assert not list(tmp_path.glob(".*"))


def test_a_checkpoint_that_is_gone_before_it_is_uploaded_is_said(tmp_path: Path) -> None:
    url, saved = f"memory://{uuid.uuid4()}/run", tmp_path / "checkpoints" / "step-1"
    mirror = Mirror(url, None)
    mirror.add(saved)
    assert "No such file" in mirror.take()[0].error
    sw.shard(nn.Linear(3, 3)).save(saved)
    for _ in range(3):  # one is on its way, one waits, one takes its place
        mirror.add(saved)
        shutil.rmtree(saved.parent / ".step-1.mirror", ignore_errors=True)
    assert all(one.url == url or not one.error for one in mirror.take(wait=True))


def test_of_a_checkpoint_that_could_not_be_copied_nothing_takes_up_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(_: Path, target: Path, **__: object) -> None:
        target.mkdir(parents=True)
        (target / "model.safetensors").write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", copied)
    mirror = Mirror(f"memory://{uuid.uuid4()}/run", None)
    mirror.add(tmp_path / "step-1")
    assert "No space left" in mirror.take()[0].error
    assert not list(tmp_path.iterdir())


def test_a_store_that_fails_is_said_and_the_run_goes_on(tmp_path: Path) -> None:
    records = run(tmp_path, "--checkpoint.mirror=nosuch://bucket", "--checkpoint.resume=never")
    failed = [record for record in records if isinstance(record, Mirrored)]
    assert all("nosuch" in record.error for record in failed)
    assert len(failed) == 2


def test_what_rank_0_writes_alone_is_not_written_in_the_background() -> None:
    with pytest.raises(ValueError, match="kind: sharded"):
        CheckpointConfig(kind="full", asynchronous=True)


def test_where_files_cannot_be_linked_they_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", no_links)
    url = f"memory://{uuid.uuid4()}/run"
    mirror = Mirror(url, None)
    mirror.add(sw.shard(nn.Linear(3, 3)).save(tmp_path / "step-1").path)
    assert mirror.take(wait=True)[-1].url == f"{url}/step-1"
