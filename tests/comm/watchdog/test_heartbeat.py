"""Heartbeats: over a store in memory, and of a process that is frozen by a signal."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

import shardwise as sw
from shardwise.checkpoint import failpoints, load
from shardwise.comm.machine.connect import over
from shardwise.comm.protocol import Comm, Label
from shardwise.comm.watchdog import heartbeat, watchdog
from shardwise.comm.watchdog.heartbeat import Heartbeats, limit
from shardwise.errors import ConfigError
from tests.copies import error_text, on_ranks
from tests.ranks import gloo_group, in_group, outcomes_of
from tests.waiting import wait_for


def pair() -> tuple[Heartbeats, Heartbeats]:
    store = HashStore()
    return Heartbeats(store, 0), Heartbeats(store, 1)


def test_a_rank_that_sends_none_is_silent_until_it_sends_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, peer = pair()
    peer.send("gather blocks.3")
    assert mine.look(2) == {}
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.001)
    time.sleep(0.01)
    assert list(mine.look(2)) == [1]
    monkeypatch.setattr(heartbeat, "INTERVAL", 10.0)
    peer.send()
    assert mine.look(2) == {}


def test_a_limit_that_is_no_number_of_seconds_is_refused_with_the_line_to_write() -> None:
    assert limit({}) == 10.0
    assert limit({"SHARDWISE_HEARTBEAT_SECONDS": "2.5"}) == 2.5
    for text in ("10s", "0", "-1", "nan", "inf", ""):
        with pytest.raises(
            ConfigError, match=f"is '{text}'.*export SHARDWISE_HEARTBEAT_SECONDS=10"
        ):
            limit({"SHARDWISE_HEARTBEAT_SECONDS": text})


def test_silent_ranks_are_described_first_with_their_last_heartbeats_and_stacks() -> None:
    mine, peer = pair()
    peer.send("gather blocks.3")
    mine.look(2)
    first, second, *others = mine.describe(range(20), {1: 7.0}).strip().splitlines()
    assert first.startswith("rank 1 has sent no heartbeat for 7 s: it is frozen, or its host ")
    assert f"The last one: process {os.getpid()} on " in first
    assert "last issued gather blocks.3" in first
    assert second == "  rank 0 has sent no heartbeat yet"
    assert len(others) == heartbeat.MOST - 2 + 1
    assert others[-1].startswith("  stack of rank 1: ")
    assert "watchdog/test_heartbeat.py:" in others[-1]


def test_the_first_heartbeat_is_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "POLL_INTERVAL", 60.0)
    store = HashStore()
    one = watchdog.Watchdog(store, 1, 2, lambda: None, 60.0)
    wait_for(lambda: store.check(["alive/1"]), 60)
    one.leave("the test ends")


def be_frozen(rank: int, world: int, folder: str, transport: str) -> str:
    """Rank 1 freezes in its third step; rank 0 wakes it when the silence was reported."""
    watch_closely()
    with gloo_group(rank, world, folder), over(dist.group.WORLD, transport=transport) as comm:
        warned = logged(comm, signal.SIGCONT)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        sw.shard(model, comm=comm)
        for step in range(4):
            if (rank, step) == (1, 2):
                freeze()
            model(torch.ones(1, 4)).sum().backward()
    return "\n".join(warned)


BEATS: list[str] = []  # that this process has sent since it was cleared


def watch_closely() -> None:
    watchdog.POLL_INTERVAL = watchdog.FIRST_CHECK = heartbeat.INTERVAL = 0.1
    heartbeat.FIRST_WARNING = 0.6
    send = Heartbeats.send

    def counted(beats: Heartbeats, last: str = "", joint: str = "") -> None:
        send(beats, last, joint)
        BEATS.append(last)

    pytest.MonkeyPatch().setattr(Heartbeats, "send", counted)


def logged(comm: Comm, then: signal.Signals) -> list[str]:
    """What is logged here from now on; rank 1 gets a signal when rank 0 reports its silence."""
    warned: list[str] = []
    pids = comm.gather_rows(torch.tensor([os.getpid()]), label()).flatten().tolist()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warned.append(record.getMessage())
            if "has sent no heartbeat" in warned[-1] and is_stopped(pids[1]):
                os.kill(pids[1], then)

    logging.getLogger("shardwise").addHandler(Listener())
    return warned


def is_stopped(pid: int) -> bool:
    """It may only be late, on a machine that is busy."""
    return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] == "T"


def freeze(*_: object) -> None:
    """Stop this process, once a heartbeat has said where it is."""
    BEATS.clear()
    wait_for(lambda: len(BEATS) > 1, 60)  # the first may have been on its way
    # A signal to the process might go to another thread, and this one go on until that runs.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def label() -> Label:
    return Label("gather", "process numbers")


@pytest.mark.spawn
@pytest.mark.parametrize("transport", ["messages", "memory", "native"])
def test_a_frozen_rank_is_named_with_its_last_heartbeat_and_goes_on_when_it_is_woken(
    transport: str,
) -> None:
    first, second = outcomes_of(2, be_frozen, transport)
    assert (first.error, second.error) == ("", "")
    assert "rank 0 has waited 1 s for rank 1 at " in first.value
    assert "rank 1 has sent no heartbeat for " in first.value
    assert "The last one: process " in first.value
    assert "after step 2" in first.value
    assert "  stack of rank 1: " in first.value


ACTS: dict[str, tuple[str, Callable[[Any, Path], object]]] = {
    "save": ("gather parts of a save", lambda model, run: model.save(run / "step-2")),
    "save_async": ("agree saving", lambda model, run: model.save_async(run / "step-2").wait()),
    "load": ("gather reading a checkpoint", lambda model, run: model.load(run / "step-1")),
    "resume": ("gather reading a checkpoint", lambda model, run: model.resume(run)),
}


def be_frozen_in(rank: int, world: int, folder: str, act: str, run: Path) -> tuple[float, str, str]:
    watch_closely()
    return in_group(rank, world, folder, _be_frozen_in, act, run)


def _be_frozen_in(comm: Comm, act: str, run: Path) -> tuple[float, str, str]:
    """Rank 1 freezes when its part is written, or before it is read; it is killed when named."""
    sharded = sw.shard(nn.Linear(64, 64), comm=comm)
    sharded.save(run / "step-1")
    warned = logged(comm, signal.SIGKILL)
    if comm.rank == 1:
        failpoints.listeners.append(lambda point, _: freeze() if point == "data written" else None)
        pytest.MonkeyPatch().setattr(load, "read_into", freeze)
    begin = time.monotonic()
    failed = error_text(sw.RanksDisagree, lambda: ACTS[act][1](sharded, run))
    return time.monotonic() - begin, "\n".join(warned), failed


@pytest.mark.spawn
@pytest.mark.parametrize("act", ACTS)
def test_a_rank_that_freezes_in_a_checkpoint_is_named_and_the_last_good_one_is_resumed(
    act: str, tmp_path: Path
) -> None:
    first, second = outcomes_of(2, be_frozen_in, act, tmp_path, timeout=60.0)
    assert (first.error, second.exitcode) == ("", -signal.SIGKILL)
    seconds, warned, failed = first.value
    assert seconds < 10.0
    assert re.search(rf"rank 0 has waited \d+ s for rank 1 at {ACTS[act][0]} ", warned)
    assert "rank 1 has sent no heartbeat for " in warned
    # While both wait for their writers, they may be at the same line.
    assert re.search(r"stack of (rank|ranks 0 and) 1: .* checkpoint/", warned)
    assert failed.startswith("rank 1 ended without a reason (killed, crashed or disconnected) ")
    assert f"at {ACTS[act][0]} " in failed

    def resumed(comm: Comm, model: nn.Module) -> str:
        report = sw.shard(model, comm=comm).resume(tmp_path)
        assert report is not None
        return report.path.name

    assert on_ranks(1, lambda: nn.Linear(64, 64), resumed) == ["step-1"]
