"""A disk that is full, read-only, gone or failing: all ranks hear of it, and nothing is lost.

What a save says, in the foreground and behind it; that the checkpoint before is as it was; that
nothing lies about; and that training goes on, and saves again when it can.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from torch import Tensor, nn

import shardwise as sw
from benchmarks.faults.calls import watched
from shardwise.checkpoint import folder, writer
from shardwise.checkpoint.collectives import all_gather_object
from shardwise.checkpoint.disk import free_bytes
from shardwise.checkpoint.run_folder import check_complete
from shardwise.comm.protocol import Comm
from tests.checkpoint.runs import adamw, names, same, steps, tensors
from tests.copies import on_ranks, seeded
from tests.nets import NETS

DECODER = NETS[0]
WAYS = ("foreground", "background")


def everything(checkpoint: Path) -> dict[str, Tensor]:
    return tensors(checkpoint, "model") | tensors(checkpoint, "optimizer")


@dataclass
class FaultyRun:
    """Two ranks that save, meet a fault, train on, and save again when it is over.

    Attributes:
        run: their folder.
        way: of ``WAYS``.
        again: the step that is saved when the fault comes; 1 is there already.
        fault: begins it, and returns what ends it. Called once.
        errors: of each rank, ``""`` without one.
        meanwhile: what was in the folder after the failure.
    """

    run: Path
    way: str
    again: int
    fault: Callable[[], Callable[[], None]]
    errors: list[str] = field(default_factory=lambda: ["", ""])
    meanwhile: list[str] = field(default_factory=list)

    def start(self) -> None:
        on_ranks(2, DECODER.build, self._rank)

    def _rank(self, comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        optimizer = adamw(model.parameters())
        sharded.save(self.run / "step-1", optimizer, sw.Training(step=1))
        steps(model, optimizer, DECODER, comm.rank, range(1))
        over = self._alone(comm, lambda: [self.fault()])
        try:
            self._save(sharded, optimizer)
        except sw.CheckpointError as error:
            self.errors[comm.rank] = str(error)
        self._alone(comm, lambda: self._look(over))
        steps(model, optimizer, DECODER, comm.rank, range(1, 2))
        sharded.save(self.run / "step-3", optimizer, sw.Training(step=3))
        report = sharded.resume(self.run, optimizer, sw.Training())
        assert report is not None
        assert report.path == self.run / "step-3"

    def _save(self, sharded: sw.Sharded, optimizer: object) -> None:
        path, training = self.run / f"step-{self.again}", sw.Training(step=self.again)
        if self.way == "foreground":
            sharded.save(path, optimizer, training)  # type: ignore[arg-type]
        else:
            saving = sharded.save_async(path, optimizer, training)  # type: ignore[arg-type]
            assert saving is not None
            saving.wait()

    def _look(self, over: list[Callable[[], None]]) -> list[Callable[[], None]]:
        over[0]()
        self.meanwhile += names(self.run)
        return []

    @staticmethod
    def _alone(comm: Comm, act: Callable[[], list[Callable[[], None]]]) -> list[Callable[[], None]]:
        """Rank 0 acts while nobody else does anything."""
        all_gather_object(comm, "", "before")
        made = act() if comm.rank == 0 else []
        all_gather_object(comm, "", "after")
        return made


# --- full ------------------------------------------------------------------------------------


def mounted(path: Path, *options: str) -> None:
    """Mount, or skip where that is not allowed."""
    if os.geteuid():
        pytest.skip("mounting a file system needs root")
    done = subprocess.run(["mount", *options, str(path)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"this container may not mount: {done.stderr.decode().strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An empty one of 1 MB; a checkpoint takes a quarter of it."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted(path, "-t", "tmpfs", "-o", "size=1m", "none")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk: Path, left: int) -> Callable[[], None]:
    filler = disk / "filler"
    filler.write_bytes(bytes(free_bytes(disk) - left))
    return filler.unlink


@pytest.mark.parametrize("again", [1, 2], ids=["same name", "new name"])
@pytest.mark.parametrize("way", WAYS)
def test_a_disk_without_room_is_found_before_anything_is_written(
    way: str, again: int, disk: Path
) -> None:
    faulty = FaultyRun(disk, way, again, lambda: fill(disk, 102_400))
    faulty.start()
    assert faulty.errors[0] == faulty.errors[1]
    assert "this checkpoint needs 2" in faulty.errors[0]
    assert f"{disk} has 96.0 KiB free, so it was not begun" in faulty.errors[0]
    assert faulty.meanwhile == ["latest", "step-1"]
    assert names(disk) == ["latest", "step-1", "step-3"]


@pytest.mark.parametrize("again", [1, 2], ids=["same name", "new name"])
@pytest.mark.parametrize("way", WAYS)
def test_a_disk_that_fills_up_while_it_is_written(
    way: str, again: int, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does whose promise of space is worth nothing, or that others fill."""
    before: list[dict[str, Tensor]] = []

    def fault() -> Callable[[], None]:
        before.append(everything(disk / "step-1"))
        free = fill(disk, 102_400)
        monkeypatch.setattr("shardwise.checkpoint.disk.free_bytes", lambda folder: 1 << 40)
        monkeypatch.setattr(writer, "fallocate", os.ftruncate)

        def over() -> None:
            monkeypatch.undo()
            free()
            assert same(everything(disk / "step-1"), before[0])

        return over

    faulty = FaultyRun(disk, way, again, fault)
    faulty.start()
    assert faulty.errors[0] == faulty.errors[1]
    assert "No space left on device" in faulty.errors[0]
    assert "the disk is full: free space there, or choose another place" in faulty.errors[0]
    assert faulty.meanwhile == ["latest", "step-1"]


# --- read-only, gone, in the way -------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_disk_that_becomes_read_only(way: str, disk: Path) -> None:
    def fault() -> Callable[[], None]:
        mounted(disk, "-o", "remount,ro")
        return lambda: mounted(disk, "-o", "remount,rw")

    faulty = FaultyRun(disk, way, 2, fault)
    faulty.start()
    assert faulty.errors[0] == faulty.errors[1]
    assert (
        "it is mounted read-only: mount it for writing, or choose another place" in faulty.errors[0]
    )
    assert faulty.meanwhile == ["latest", "step-1"]


@pytest.mark.parametrize("point", ["folder made", "data synced", "all parts known"])
@pytest.mark.parametrize("way", WAYS)
def test_a_folder_that_vanishes_while_it_is_written(
    way: str, point: str, tmp_path: Path, listen: Callable[[Callable[[str, int], None]], None]
) -> None:
    removed = threading.Event()

    def remove(at: str, rank: int) -> None:
        partials = list(tmp_path.glob("step-2.partial-*"))
        if (at, rank) == (point, 0) and partials and not removed.is_set():
            removed.set()
            shutil.rmtree(partials[0].rename(tmp_path / "gone"))  # at once, also while others write

    def fault() -> Callable[[], None]:
        listen(remove)
        return lambda: None

    faulty = FaultyRun(tmp_path, way, 2, fault)
    faulty.start()
    assert removed.is_set()
    assert faulty.errors[0] == faulty.errors[1]
    assert (
        ": there" in faulty.errors[0]
        or "No such file or directory" in faulty.errors[0]
        or ("does not show the folder" in faulty.errors[0])
    )
    assert faulty.meanwhile == ["latest", "step-1"]


@pytest.mark.parametrize("way", WAYS)
def test_a_file_in_the_way_stays(way: str, tmp_path: Path) -> None:
    def fault() -> Callable[[], None]:
        (tmp_path / "step-2").write_text("mine")
        return lambda: None

    faulty = FaultyRun(tmp_path, way, 2, fault)
    faulty.start()
    assert faulty.errors[0] == faulty.errors[1]
    assert "exists and is no checkpoint of shardwise, so it is left alone" in faulty.errors[0]
    assert (tmp_path / "step-2").read_text() == "mine"


# --- every call fails once -------------------------------------------------------------------


@dataclass
class Failing:
    """The n-th file-system call of one rank fails, once, after ``arm``."""

    nth: int
    who: int
    armed: bool = False
    count: int = 0
    ranks: dict[int | None, int] = field(default_factory=dict)
    failed: str = ""

    def before(self, call: str) -> None:
        thread = threading.current_thread()
        rank = self.ranks.get(thread.ident)
        if thread.name.startswith("saving "):
            rank = int(thread.name[-1])
        if not self.armed or rank != self.who:
            return
        self.count += 1
        if self.count == self.nth:
            self.failed = call
            raise OSError(errno.EIO, os.strerror(errno.EIO), call)


def tried(run: Path, way: str, exchanges: bool, failing: Failing) -> list[str]:
    """The error on each rank of a save over ``step-1`` in which a call failed; then all is well."""
    errors = ["", ""]

    def rank(comm: Comm, model: nn.Module) -> None:
        failing.ranks[threading.get_ident()] = comm.rank
        sharded = sw.shard(model, comm=comm)
        sharded.save(run / "step-1")
        all_gather_object(comm, "", "before")
        failing.armed = True
        try:
            if way == "foreground":
                sharded.save(run / "step-1", save_total_limit=1)
            else:
                saving = sharded.save_async(run / "step-1", save_total_limit=1)
                assert saving is not None
                saving.wait()
        except sw.CheckpointError as error:
            errors[comm.rank] = str(error)
        all_gather_object(comm, "", "after")
        failing.armed = False
        if comm.rank == 0:  # whatever failed
            check_complete(run / "step-1")
            assert not (errors[0] and list(run.glob("*.partial-*/.lock")))
        all_gather_object(comm, "", "looked")
        sharded.save(run / "step-3")

    with watched(failing.before), pytest.MonkeyPatch.context() as patch:
        if not exchanges:
            patch.setattr(folder, "_exchange", lambda one, other: False)
        on_ranks(2, lambda: nn.Linear(64, 64), rank)
    return errors


@pytest.mark.parametrize("exchanges", [True, False], ids=["one rename", "two renames"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.prove), 1])
def test_any_call_may_fail(who: int, way: str, exchanges: bool, tmp_path: Path) -> None:
    """All ranks hear the same; the old checkpoint or the new one is whole; the next save works."""
    kinds: dict[str, int] = {}
    for nth in range(1, 200):
        run = tmp_path / str(nth)
        failing = Failing(nth, who)
        errors = tried(run, way, exchanges, failing)
        if not failing.failed:
            break
        assert errors[0] == errors[1], (nth, failing.failed)
        assert not errors[0] or "Input/output error" in errors[0], (nth, errors[0])
        kinds[failing.failed] = kinds.get(failing.failed, 0) + bool(errors[0])
        assert names(run) == ["latest", "step-1", "step-3"], (nth, failing.failed)
    assert {"open", "pwrite", "fsync"} <= {kind for kind, count in kinds.items() if count}
    if who == 0:
        assert {"mkdir", "rename", "replace", "symlink", "unlink", "rmdir"} <= set(kinds)


def test_a_failure_that_was_waited_for_is_not_told_again(
    tmp_path: Path, listen: Callable[[Callable[[str, int], None]], None]
) -> None:
    failures = [1]

    def fail(point: str, rank: int) -> None:
        if point == "data written" and rank == 0 and failures:
            failures.pop()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    listen(fail)
    model = seeded(DECODER.build)
    sharded, optimizer = sw.shard(model), adamw(model.parameters())
    saving = sharded.save_async(tmp_path / "step-1", optimizer)
    assert saving is not None
    with pytest.raises(sw.CheckpointError, match="Input/output error"):
        saving.wait()
    steps(model, optimizer, DECODER, 0, range(1))  # the step does not raise it once more
    sharded.save(tmp_path / "step-2", optimizer)
