"""Heartbeats: over a store in memory, and of a process that is frozen by a signal."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

import shardwise as sw
from shardwise.comm.machine.connect import over
from shardwise.comm.protocol import Label
from shardwise.comm.watchdog import heartbeat, watchdog
from shardwise.comm.watchdog.heartbeat import Heartbeats, limit
from shardwise.errors import ConfigError
from tests.comm.watchdog.test_watchdog import until
from tests.ranks import gloo_group, outcomes_of


def pair() -> tuple[Heartbeats, Heartbeats]:
    store = HashStore()
    return Heartbeats(store, 0), Heartbeats(store, 1)


def test_a_rank_that_sends_none_is_silent_until_it_sends_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, theirs = pair()
    theirs.send("gather blocks.3")
    assert mine.look(2) == {}
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.001)
    time.sleep(0.01)
    assert list(mine.look(2)) == [1]
    monkeypatch.setattr(heartbeat, "INTERVAL", 10.0)
    theirs.send()
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
    mine, theirs = pair()
    theirs.send("gather blocks.3")
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
    until(lambda: store.check(["alive/1"]))
    one.leave("the test ends")


def be_frozen(rank: int, world: int, folder: str, transport: str) -> str:
    """Rank 1 freezes in its third step; rank 0 wakes it when the silence was reported."""
    watchdog.POLL_INTERVAL = watchdog.FIRST_CHECK = heartbeat.INTERVAL = 0.1
    heartbeat.FIRST_WARNING = 0.6
    said: list[str] = []
    reported = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            if "has sent no heartbeat" in said[-1]:
                reported.set()

    def wake(pid: int) -> None:
        reported.wait(60)
        os.kill(pid, signal.SIGCONT)

    logging.getLogger("shardwise").addHandler(Listener())
    with gloo_group(rank, world, folder), over(dist.group.WORLD, transport=transport) as comm:
        pids = comm.gather_rows(torch.tensor([os.getpid()]), label()).flatten().tolist()
        if rank == 0:
            threading.Thread(target=wake, args=(pids[1],), daemon=True).start()
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        sw.shard(model, comm=comm)
        for step in range(4):
            if (rank, step) == (1, 2):
                time.sleep(0.3)  # so that a heartbeat says where
                os.kill(os.getpid(), signal.SIGSTOP)
            model(torch.ones(1, 4)).sum().backward()
    return "\n".join(said)


def label() -> Label:
    return Label("gather", "process numbers")


@pytest.mark.spawn
@pytest.mark.parametrize("transport", ["messages", "memory", "native"])
def test_a_frozen_rank_is_named_with_its_last_heartbeat_and_goes_on_when_it_is_woken(
    transport: str,
) -> None:
    mine, theirs = outcomes_of(2, be_frozen, transport)
    assert (mine.error, theirs.error) == ("", "")
    assert "rank 0 has waited 1 s for rank 1 at " in mine.value
    assert "rank 1 has sent no heartbeat for " in mine.value
    assert "The last one: process " in mine.value
    assert "after step 2" in mine.value
    assert "  stack of rank 1: " in mine.value
