"""What a run's folder means, whatever was interrupted."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardwise as sw
from shardwise.checkpoint import folder, lock
from shardwise.checkpoint.folder import (
    Partial,
    check_replaceable,
    checkpoints,
    mark_broken,
    move_latest,
    new_token,
    publish,
    remove,
    remove_stale_partials,
    resolve,
    target_of,
)
from shardwise.errors import CheckpointError
from tests.checkpoint.runs import names


def checkpoint(path: Path, text: str = "whole") -> Path:
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(text)
    return path


# --- names -----------------------------------------------------------------------------------


def test_latest_leads_to_a_sibling(tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path / "step-1"), checkpoint(tmp_path / "step-2")
    move_latest(first)
    assert resolve(tmp_path / "latest") == first
    move_latest(second)
    assert resolve(tmp_path / "latest") == second
    assert target_of(tmp_path) == "step-2"
    assert str((tmp_path / "latest").readlink()) == "step-2"  # so that every tool can follow it
    assert names(tmp_path) == ["latest", "step-1", "step-2"]


def test_latest_may_be_a_text_where_links_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, target: str) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(Path, "symlink_to", refused)
    move_latest(checkpoint(tmp_path / "step-1"))
    assert (tmp_path / "latest").read_text() == "step-1\n"
    assert resolve(tmp_path / "latest") == tmp_path / "step-1"


@pytest.mark.parametrize("target", ["../elsewhere", "/etc", "..", ""])
def test_latest_never_leads_elsewhere(tmp_path: Path, target: str) -> None:
    (tmp_path / "latest").write_text(target)
    with pytest.raises(CheckpointError, match="is not followed"):
        resolve(tmp_path / "latest")


def test_a_path_without_a_checkpoint_names_what_is_there(tmp_path: Path) -> None:
    checkpoint(tmp_path / "step-1")
    with pytest.raises(CheckpointError, match="no checkpoint here; beside it are step-1"):
        resolve(tmp_path / "step-2")
    with pytest.raises(CheckpointError, match="empty or absent"):
        resolve(tmp_path / "no" / "step-2")
    (tmp_path / "latest").symlink_to("step-3")
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        resolve(tmp_path / "latest")


# --- writing ---------------------------------------------------------------------------------


def test_a_finished_folder_gets_its_name_at_once(tmp_path: Path) -> None:
    partial = Partial.make(tmp_path / "run" / "step-1", new_token())
    (partial.path / "manifest.json").write_text("new")
    assert not partial.final.exists()
    publish(partial)
    assert names(tmp_path / "run") == ["step-1"]
    assert names(partial.final) == ["manifest.json"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_checkpoint_replaces_one_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:  # as on network file systems
        monkeypatch.setattr(folder, "_exchange", lambda one, other: False)
    checkpoint(tmp_path / "step-1", "old")
    partial = Partial.make(tmp_path / "step-1", new_token())
    (partial.path / "manifest.json").write_text("new")
    publish(partial)
    assert names(tmp_path) == ["step-1"]
    assert (tmp_path / "step-1" / "manifest.json").read_text() == "new"


def test_a_replaced_checkpoint_stays_if_the_new_name_may_not_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names were exchanged, and the folder that holds them could not be synced."""

    def fails(path: Path) -> None:
        raise OSError(5, "Input/output error")

    checkpoint(tmp_path / "step-1", "old")
    partial = Partial.make(tmp_path / "step-1", new_token())
    (partial.path / "manifest.json").write_text("new")
    monkeypatch.setattr(folder, "sync_folder", fails)
    with pytest.raises(OSError, match="Input/output error"):
        publish(partial)
    partial.abandon()
    assert (tmp_path / "step-1" / "manifest.json").read_text() == "new"
    assert (partial.path / "manifest.json").read_text() == "old"
    monkeypatch.undo()
    assert remove_stale_partials(tmp_path) == [partial.path.name]


def test_giving_up_what_was_published_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that turns read-only: neither can the old one be removed, nor ``latest`` move."""

    def fails(path: Path) -> None:
        raise OSError(30, "Read-only file system")

    checkpoint(tmp_path / "step-1", "old")
    partial = Partial.make(tmp_path / "step-1", new_token())
    (partial.path / "manifest.json").write_text("new")
    monkeypatch.setattr(folder, "remove", fails)
    publish(partial)
    partial.abandon()  # as a save does whose next call fails
    assert (tmp_path / "step-1" / "manifest.json").read_text() == "new"


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("damaged", [False, True])
def test_what_no_save_wrote_stays_in_the_checkpoint_that_replaces_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool, damaged: bool
) -> None:
    sharded, step = sw.shard(nn.Linear(2, 2)), tmp_path / "step-1"
    sharded.save(step, files={"README.md": "first"})
    sharded.save(step / "ema")
    (step / "notes.txt").write_text("mine")
    (step / "config.json").write_text("mine")
    if damaged:
        (step / "manifest.json").write_text("{")
    if not exchanges:
        monkeypatch.setattr(folder, "_exchange", lambda *_: False)
    sharded.save(step, files={"config.json": "{}"})
    ours = ["config.json", "manifest.json", "model.safetensors"]
    # what a damaged manifest listed is not known, so less goes
    more = ["README.md"] if damaged else ["config.json.1"]
    assert names(step) == sorted([*ours, *more, "ema", "notes.txt"])
    assert (step / "notes.txt").read_text() == "mine"
    assert (step / "config.json").read_text() == "{}"
    assert sharded.load(step / "ema").checked
    assert names(tmp_path) == ["latest", "step-1"]


def test_a_crash_before_that_loses_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(BaseException):
        pass

    def crashes(*_: Path) -> None:
        raise Crash

    sharded, step = sw.shard(nn.Linear(2, 2)), tmp_path / "step-1"
    sharded.save(step)
    (step / "notes.txt").write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(folder, "_carry", crashes)
        with pytest.raises(Crash):
            sharded.save(step)
    assert not (step / "notes.txt").exists()
    sharded.save(tmp_path / "step-2")
    assert (step / "notes.txt").read_text() == "mine"
    assert names(tmp_path) == ["latest", "step-1", "step-2"]


def test_of_two_saves_to_one_name_at_once_the_first_stays(tmp_path: Path) -> None:
    for old in (False, True):
        if old:
            checkpoint(tmp_path / "step-1", "old")
        one, two = (Partial.make(tmp_path / "step-1", new_token()) for _ in range(2))
        for partial, text in ((one, "the first"), (two, "second")):
            (partial.path / "manifest.json").write_text(text)
        publish(one)
        with pytest.raises(CheckpointError, match="was saved by another call while this one"):
            publish(two)
        two.abandon()
        assert (tmp_path / "step-1" / "manifest.json").read_text() == "the first"
        assert names(tmp_path) == ["step-1"]
        shutil.rmtree(tmp_path / "step-1")


def test_an_empty_folder_of_the_name_is_taken(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    publish(Partial.make(tmp_path / "step-1", new_token()))
    assert names(tmp_path) == ["step-1"]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "photos"
    if kind == "folder":
        path.mkdir()
        (path / "me.jpg").write_text("x")
    else:
        path.write_text("x")
    with pytest.raises(CheckpointError, match="no checkpoint of shardwise, so it is left alone"):
        check_replaceable(path)
    assert names(tmp_path) == ["photos"]


@pytest.mark.parametrize("text", ['{"name": "pwa"}', "", "[]", '{"format": "shardwise"}'])
def test_a_manifest_of_others_makes_no_checkpoint(tmp_path: Path, text: str) -> None:
    """Web sites have one, too. A run's own damaged step must not keep it from saving again."""
    with pytest.raises(CheckpointError, match="no checkpoint of shardwise, so it is left alone"):
        check_replaceable(checkpoint(tmp_path / "site", text))
    check_replaceable(checkpoint(tmp_path / "step-3", text))


@pytest.mark.parametrize(
    "name",
    ["latest", "a.partial-0123456789abcdef", "a.removing-" + 16 * "0", ".hidden", "broken-a-1"],
)
def test_names_with_a_meaning_of_their_own_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be called"):
        check_replaceable(tmp_path / name)


# --- after a crash ---------------------------------------------------------------------------


def test_what_the_dead_left_goes_and_what_is_being_written_stays(tmp_path: Path) -> None:
    complete = checkpoint(tmp_path / "step-1")
    dead = Partial.make(tmp_path / "step-2", new_token())
    dead.lock.close()  # as the end of a process does
    alive = Partial.make(tmp_path / "step-2", new_token())
    going = checkpoint(tmp_path / f"step-0.removing-{new_token()}")
    other = checkpoint(tmp_path / "step-5.partial-mine")  # not a name of ours
    assert sorted(remove_stale_partials(tmp_path)) == sorted([dead.path.name, going.name])
    assert names(tmp_path) == sorted([complete.name, alive.path.name, other.name])
    alive.lock.close()
    assert remove_stale_partials(tmp_path) == [alive.path.name]


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            Partial.make(tmp_path / "step-1", 16 * "a")
        finally:  # or an error would go on here, as a second pytest
            os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    assert remove_stale_partials(tmp_path) == ["step-1.partial-" + 16 * "a"]


def test_a_partial_folder_without_a_lock_goes(tmp_path: Path) -> None:
    """Left where two names were exchanged, or by a removal that was interrupted."""
    exchanged = checkpoint(tmp_path / f"step-1.partial-{new_token()}")
    removed = tmp_path / f"step-2.partial-{new_token()}"
    removed.mkdir()
    assert sorted(remove_stale_partials(tmp_path)) == [exchanged.name, removed.name]


def test_a_folder_that_is_swept_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open
    swept: list[str] = []

    def others_sweep(path: Path, *args: int, **kwargs: Any) -> int:
        if Path(path).name == f"{lock.LOCK}.new" and not swept:
            swept.append("now")
            swept.extend(remove_stale_partials(tmp_path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", others_sweep)
    partial = Partial.make(tmp_path / "step-1", new_token())
    assert swept == ["now", partial.path.name]
    assert remove_stale_partials(tmp_path) == []
    partial.lock.close()


def test_what_was_to_become_latest_goes(tmp_path: Path) -> None:
    move_latest(checkpoint(tmp_path / "step-1"))
    link = tmp_path / f".latest-{new_token()}"
    link.symlink_to("step-2")
    assert remove_stale_partials(tmp_path) == [link.name]
    assert names(tmp_path) == ["latest", "step-1"]


def test_where_nobody_can_lock_only_what_is_an_hour_old_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(fd: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    partial = Partial.make(tmp_path / "step-1", new_token())
    assert "this file system has no locks" in caplog.text
    partial.lock.close()
    assert remove_stale_partials(tmp_path) == []
    age(partial.path)
    assert remove_stale_partials(tmp_path) == [partial.path.name]


def age(path: Path) -> None:
    """Set times as if nothing had changed there for a little more than an hour."""
    for one in (*path.iterdir(), path):
        before = one.stat().st_mtime - lock.SILENCE - 1
        os.utime(one, (before, before))


def test_what_another_host_writes_is_left_alone_where_locks_do_not_leave_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Lustre with localflock, and NFS with nolock: whoever asks there gets the lock.

    The clock of this host is hours ahead.
    """
    monkeypatch.setattr(time, "time", lambda: 1e10)
    with monkeypatch.context() as patch:
        patch.setattr(lock, "host", lambda: "another host")
        partial = Partial.make(tmp_path / "step-1", new_token())
    partial.lock.close()  # so that the lock is free, as it looks from here
    assert remove_stale_partials(tmp_path) == []
    age(partial.path)
    (partial.path / "model.safetensors").touch()  # it still writes
    assert remove_stale_partials(tmp_path) == []
    age(partial.path)
    assert remove_stale_partials(tmp_path) == [partial.path.name]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open anything")
def test_what_may_not_be_opened_is_left_alone(tmp_path: Path) -> None:
    partial = Partial.make(tmp_path / "step-1", new_token())
    partial.lock.close()
    (partial.path / lock.LOCK).chmod(0)
    assert remove_stale_partials(tmp_path) == []


def test_a_damaged_checkpoint_gets_a_name_that_no_resume_takes(tmp_path: Path) -> None:
    for number in (1, 2):
        checkpoint(tmp_path / "step-3")
        assert mark_broken(tmp_path / "step-3") == tmp_path / f"broken-step-3-{number}"
    assert checkpoints(tmp_path) == []


def test_between_two_renames_nothing_is_lost(tmp_path: Path) -> None:
    """Where folders cannot be exchanged, a crash may leave the old one under another name."""
    old = checkpoint(tmp_path / f"step-1.replaced-{new_token()}", "old")
    dead = Partial.make(tmp_path / "step-1", new_token())
    dead.lock.close()
    move_latest(tmp_path / "step-1")
    assert resolve(tmp_path / "step-1") == old
    assert resolve(tmp_path / "latest") == old
    assert not (tmp_path / "step-1").exists()
    assert checkpoints(tmp_path) == [tmp_path / "step-1"]
    remove_stale_partials(tmp_path)
    assert checkpoints(tmp_path) == [tmp_path / "step-1"]
    (tmp_path / "latest").unlink()
    assert names(tmp_path) == ["step-1"]
    assert (tmp_path / "step-1" / "manifest.json").read_text() == "old"


def test_a_replaced_checkpoint_goes_when_its_successor_is_there(tmp_path: Path) -> None:
    checkpoint(tmp_path / "step-1", "new")
    old = checkpoint(tmp_path / f"step-1.replaced-{new_token()}", "old")
    assert remove_stale_partials(tmp_path) == [old.name]
    assert (tmp_path / "step-1" / "manifest.json").read_text() == "new"


def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert remove_stale_partials(tmp_path / "no") == []


def test_removing_takes_the_name_away_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path / "step-1")
    removed: list[str] = []
    monkeypatch.setattr(shutil, "rmtree", lambda path: removed.append(path.name))
    remove(path)
    assert names(tmp_path) == removed
    assert removed[0].startswith("step-1.removing-")
