"""A save in the background holds what was there when it was called, or says that it failed."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import background, failpoints
from shardwise.checkpoint.plan import BLOCK
from shardwise.checkpoint.run_folder import check_complete
from shardwise.checkpoint.staging import Copy, Pool, budget_of
from shardwise.checkpoint.writer import Chunk
from shardwise.comm.protocol import Comm
from shardwise.comm.watchdog import heartbeat
from tests.checkpoint.runs import adamw, names, same, saved, steps, tensors
from tests.copies import clones, error_text, on_ranks, seeded
from tests.nets import NETS, Net
from tests.ranks import outcomes_of, run_processes
from tests.steps import STRATEGIES

DECODER = NETS[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("net", [DECODER, NETS[2], NETS[6]], ids=str)
def test_it_holds_what_was_there_when_it_was_called(
    net: Net, strategy: str, tmp_path: Path
) -> None:
    """Also where the next forward passes change buffers, and backward passes run meanwhile."""

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, strategy, comm=comm)
        optimizer = adamw(model.parameters())
        steps(model, optimizer, net, comm.rank, range(2))
        what = (optimizer, sw.Training(step=2))
        sharded.save(tmp_path / "truth" / "step-2", *what)
        saving = sharded.save_async(tmp_path / "step-2", *what)
        assert saving is not None
        steps(model, optimizer, net, comm.rank, range(2, 4))
        report = saving.wait()
        assert saving.check() == report
        assert report.path == tmp_path / "step-2"

    on_ranks(3, net.build, rank)
    for stem in ("model", "optimizer", "ranks"):
        stored = tensors(tmp_path / "step-2", stem)
        assert same(stored, tensors(tmp_path / "truth" / "step-2", stem))
    assert names(tmp_path) == ["latest", "step-2", "truth"]
    check_complete(tmp_path / "step-2")


def wide() -> nn.Module:
    return nn.Linear(1024, 8 * 1024, bias=False)  # 32 MiB


def test_too_small_a_budget_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        with pytest.raises(sw.ConfigError, match=r"snapshot_bytes is 10; at least 4,194,304"):
            sharded.save_async(tmp_path / "step-1", snapshot_bytes=10)

    on_ranks(2, DECODER.build, rank)


def test_ranks_that_share_a_host_share_the_memory_for_copies(tmp_path: Path) -> None:
    def rank(comm: Comm, model: nn.Module) -> int:
        sharded = sw.shard(model, comm=comm)
        saving = sharded.save_async(tmp_path / "step-1")
        assert saving is not None
        saving.wait()
        return saving._copying._pool.budget

    assert on_ranks(3, DECODER.build, rank) == 3 * [budget_of(3)]


@pytest.mark.prove
def test_many_saves_in_a_row(tmp_path: Path) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(20):
            steps(model, optimizer, DECODER, comm.rank, range(step, step + 1))
            saving = sharded.save_async(
                tmp_path / f"step-{step}", optimizer, sw.Training(step=step), save_total_limit=2
            )
        assert saving is not None
        assert saving.wait().removed == ("step-17",)

    on_ranks(2, DECODER.build, rank, timeout=100.0)
    assert names(tmp_path) == ["latest", "step-18", "step-19"]


def test_a_save_that_comes_too_early_is_skipped_or_waits(
    tmp_path: Path,
    listen: Callable[[Callable[[str, int], None]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    may_go = threading.Event()

    def wait(point: str, rank: int) -> None:
        if point == "data written":
            may_go.wait(60)

    listen(wait)

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        first = sharded.save_async(tmp_path / "step-1")
        assert first is not None
        assert first.check() is None
        assert sharded.save_async(tmp_path / "step-2", when_busy="skip") is None
        assert not (tmp_path / "step-1").exists()
        may_go.set()
        second = sharded.save_async(tmp_path / "step-3")
        assert (tmp_path / "step-1").exists()
        assert second is not None
        sharded.save(tmp_path / "step-4")  # waits, too
        assert (tmp_path / "step-3").exists()

    on_ranks(2, DECODER.build, rank)
    assert names(tmp_path) == ["latest", "step-1", "step-3", "step-4"]
    assert "step-2 is not saved: the save before it is still being written" in caplog.text


def test_a_writer_that_is_stuck_is_named_while_all_wait_for_it(
    tmp_path: Path,
    listen: Callable[[Callable[[str, int], None]], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat, "FIRST_WARNING", 0.1)

    def wait_until_named(point: str, rank: int) -> None:
        until = time.monotonic() + 20
        while point == "data written" and rank == 1 and time.monotonic() < until:
            if "rank 1 still writes" in caplog.text:
                return
            time.sleep(0.01)

    listen(wait_until_named)

    def rank(comm: Comm, model: nn.Module) -> None:
        saving = sw.shard(model, comm=comm).save_async(tmp_path / "step-1")
        assert saving is not None
        saving.wait()

    on_ranks(2, DECODER.build, rank)
    assert f"s for {tmp_path / 'step-1'}, which rank 1 still writes: the disk " in caplog.text


# --- when it fails ---------------------------------------------------------------------------


def fails(point: str, rank: int) -> Callable[[str, int], None]:
    """A disk that breaks at one point of one rank's next save."""
    failures = [1]

    def listener(at: str, who: int) -> None:
        if (at, who) == (point, rank) and failures:
            failures.pop()
            raise OSError(28, "No space left on device", "there")

    return listener


@pytest.mark.parametrize(
    "who", [0, *(pytest.param(who, marks=pytest.mark.prove) for who in (1, 2))]
)
@pytest.mark.parametrize("point", ["half of the data written", "data written"])
def test_an_error_on_one_rank_is_an_error_on_all_at_the_next_step(
    point: str, who: int, tmp_path: Path, listen: Callable[[Callable[[str, int], None]], None]
) -> None:
    saved(DECODER, 3, tmp_path / "step-0")
    before = tensors(tmp_path / "step-0", "model")
    listen(fails(point, who))

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        optimizer = adamw(model.parameters())
        saving = sharded.save_async(tmp_path / "step-0", optimizer)
        assert saving is not None
        saving.finish_copy()
        saving._thread.join(60)  # on rank 0 it waits for the others
        state = clones(model.state_dict())
        text = error_text(
            sw.CheckpointError, lambda: steps(model, optimizer, DECODER, comm.rank, range(1))
        )
        assert same(state, model.state_dict())  # the step was not taken
        optimizer.step()  # and now it is
        sharded.save_async(tmp_path / "step-1", optimizer)
        optimizer.step()
        sharded.save(tmp_path / "step-2", optimizer)
        return text

    texts = on_ranks(3, DECODER.build, rank)
    assert len(set(texts)) == 1
    assert f"rank {who}: " in texts[0]
    assert "No space left" in texts[0]
    assert same(tensors(tmp_path / "step-0", "model"), before)
    assert names(tmp_path) == ["latest", "step-0", "step-1", "step-2"]


def refusals(path: Path) -> list[str]:
    """The errors of a save in the background of two ranks, by rank."""

    def rank(comm: Comm, model: nn.Module) -> str:
        saving = sw.shard(model, comm=comm).save_async(path)
        assert saving is not None
        return error_text(sw.CheckpointError, saving.wait)

    return on_ranks(2, DECODER.build, rank)


@pytest.mark.parametrize("point", failpoints.POINTS[6:11])
def test_an_error_while_publishing_is_one_too(
    point: str, tmp_path: Path, listen: Callable[[Callable[[str, int], None]], None]
) -> None:
    listen(fails(point, 0))

    texts = refusals(tmp_path / "step-1")
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"saving {tmp_path / 'step-1'} in the background failed: rank 0: ")
    assert names(tmp_path) == []


def test_a_mistake_of_ours_in_the_background_is_no_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(background, "await_parts", broken)

    assert "rank 0: ZeroDivisionError: oops" in refusals(tmp_path / "step-1")[1]


def test_after_an_interrupted_save_the_next_has_all_its_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    listen: Callable[[Callable[[str, int], None]], None],
) -> None:
    may_go = threading.Event()

    def wait(point: str, rank: int) -> None:
        if point == "half of the data written":
            may_go.wait(60)

    def copy(self: Pool, chunk: Chunk) -> Copy:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return real(self, chunk)

    listen(wait)
    real = Pool.copy
    monkeypatch.setattr(Pool, "copy", copy)
    sharded = sw.shard(wide())
    saving = sharded.save_async(tmp_path / "step-1", snapshot_bytes=16 * BLOCK)
    assert saving is not None
    with pytest.raises(KeyboardInterrupt):
        saving.finish_copy()
    may_go.set()
    assert "it was interrupted" in error_text(sw.CheckpointError, saving.wait)
    for step in range(2, 5):
        saving = sharded.save_async(tmp_path / f"step-{step}", snapshot_bytes=16 * BLOCK)
        assert saving is not None
        saving.wait()
    assert names(tmp_path) == ["latest", "step-2", "step-3", "step-4"]


def test_a_system_without_room_for_a_thread_is_an_error_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused(threading.Thread):
        def start(self) -> None:
            if self.name == "saving step-1, rank 1":
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(background, "Thread", Refused)

    texts = refusals(tmp_path / "step-1")
    assert texts[0] == texts[1]
    assert "rank 1: RuntimeError: can't start new thread" in texts[0]
    assert names(tmp_path) == []


def test_a_writer_that_ends_without_a_word_has_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background.Saving, "_run", lambda self: None)

    assert "its writer died" in refusals(tmp_path / "step-1")[0]
    assert names(tmp_path) == []


def test_the_writer_copies_in_a_stream_that_follows_that_of_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the default stream it would read what the user's own stream has yet to compute."""
    users, beside = MagicMock(), MagicMock()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: users)
    monkeypatch.setattr(torch, "Stream", lambda device: beside)
    assert background._stream_beside(torch.device("cuda", 0)) is beside
    beside.wait_stream.assert_called_once_with(users)
    assert background._stream_beside(torch.device("cpu")) is None


def test_a_save_in_inference_mode_leaves_memory_for_the_next(tmp_path: Path) -> None:
    sharded = sw.shard(wide())
    for step, mode in enumerate((True, False, True)):
        with torch.inference_mode(mode):
            saving = sharded.save_async(tmp_path / f"step-{step}")
            assert saving is not None
            saving.wait()


def limited(comm: Comm, path: str) -> str:
    model = seeded(lambda: nn.Linear(1024, 2048, bias=False))  # 8 MiB
    sharded = sw.shard(model, comm=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded.save(path, optimizer)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if comm.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, limit[1]))
    sharded.save_async(path, optimizer)
    time.sleep(0.5)
    model(torch.ones(1, 1024)).sum().backward()
    try:
        optimizer.step()
    except sw.CheckpointError as error:
        sharded.load(path, optimizer)
        return str(error)
    raise AssertionError


@pytest.mark.spawn
def test_a_disk_that_refuses_in_the_background(tmp_path: Path) -> None:
    texts = run_processes(2, limited, str(tmp_path / "step-1"))
    assert texts[0] == texts[1]
    assert "rank 1: writing step-1.partial-" in texts[0]
    assert "ulimit -f" in texts[0]
    assert names(tmp_path) == ["latest", "step-1"]


def killed(rank: int, world: int, folder: str, path: str, who: int) -> None:
    from tests.ranks import in_group

    in_group(rank, world, folder, _killed, path, who)


def _killed(comm: Comm, path: str, who: int) -> None:
    model = seeded(DECODER.build)
    sharded = sw.shard(model, comm=comm)
    sharded.save(f"{path}/step-1")

    def kill(point: str, rank: int) -> None:
        if point == "data written" and rank == who:
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.listeners.append(kill)
    saving = sharded.save_async(f"{path}/step-2")
    assert saving is not None
    saving.wait()


@pytest.mark.prove
@pytest.mark.spawn
@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_dies_while_it_writes_ends_the_others_and_loses_nothing(
    who: int, tmp_path: Path
) -> None:
    outcomes = outcomes_of(2, killed, str(tmp_path), who)
    assert outcomes[who].exitcode == -signal.SIGKILL
    assert "RanksDisagree" in outcomes[1 - who].error
    remaining = names(tmp_path)
    assert "step-1" in remaining
    assert "step-2" not in remaining
    assert (tmp_path / "latest").readlink() == Path("step-1")

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        report = sharded.resume(tmp_path)
        assert report is not None
        assert report.path.name == "step-1"
        sharded.save(tmp_path / "step-2")

    on_ranks(3, DECODER.build, rank)
    assert names(tmp_path) == ["latest", "step-1", "step-2"]
