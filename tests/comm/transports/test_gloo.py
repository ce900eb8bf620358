"""How a group ends when its ranks do not do the same: soon, on every rank, with the reason.

The same over gloo messages and over shared memory.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

import shardwise as sw
from shardwise.comm.machine.connect import over
from shardwise.comm.protocol import Comm, Label
from shardwise.comm.transports import gloo
from shardwise.comm.watchdog import watchdog
from shardwise.comm.watchdog.desync import NO_TAG
from shardwise.errors import RanksDisagree
from tests.comm.differences import extra, gather, larger, missing, swapped
from tests.ranks import Outcome, gloo_group, outcomes_of, run_threads
from tests.waiting import wait_for

SOON = 60.0  # seconds: on a busy machine, too, and far below the time limit of half an hour
TRANSPORTS = ["messages", "memory"]


def look_soon() -> None:
    """What a rank does after 1.5 seconds of waiting, it does at once."""
    watchdog.POLL_INTERVAL = watchdog.FIRST_CHECK = 0.05


# --- what rank 1 does differently ------------------------------------------------------------


def smaller(comm: Comm) -> None:
    gather(comm, "blocks.3", 128 if comm.rank == 0 else 1)


def empty(comm: Comm) -> None:
    gather(comm, "blocks.3", 128 if comm.rank == 0 else 0)
    gather(comm, "blocks.4")


def another_kind(comm: Comm) -> None:
    if comm.rank == 0:
        gather(comm, "blocks.3")
    else:
        comm.exchange(torch.zeros(256), lambda _: None, Label("gather", "blocks.3")).wait()


def another_root(comm: Comm) -> None:
    comm.broadcast(torch.zeros(4), comm.rank, Label("broadcast", "blocks.3")).wait()


def agreeing(comm: Comm) -> None:
    if comm.rank == 0:
        gather(comm, "blocks.3")
    else:
        comm.agree({"layout": "a"})


def issued_ahead(comm: Comm) -> None:
    fulls = [torch.zeros(2 * n) for n in range(1, 40)]
    units = list(range(1, 40))
    if comm.rank == 1:
        units[20], units[21] = units[21], units[20]
    labels = [Label("gather", f"blocks.{i}") for i in units]
    flying = [comm.all_gather(f, label) for f, label in zip(fulls, labels, strict=True)]
    for pending in reversed(flying):
        pending.wait()


def closed(comm: Comm) -> None:
    if comm.rank == 0:
        gather(comm, "blocks.3")
    else:
        comm.close()
        gather(comm, "blocks.3")


def raised(comm: Comm) -> None:
    if comm.rank == 0:
        gather(comm, "blocks.3")
    else:
        with pytest.raises(ValueError, match="the loader"), comm:
            raise ValueError("the loader found no file")
        gather(comm, "blocks.3")


DIFFERENCES: dict[Callable[[Comm], None], str] = {
    missing: "collective 1 differs: rank 1 is at gather blocks.4 (1,024 bytes), "
    "rank 0 at gather blocks.3 (1,024 bytes). The last one in common was gather blocks.2.",
    extra: "collective 1 differs: rank 1 is at gather blocks.2 (1,024 bytes), "
    "rank 0 at gather blocks.3 (1,024 bytes).",
    swapped: "collective 0 differs: rank 1 is at gather blocks.3 (1,024 bytes), "
    "rank 0 at gather blocks.2 (1,024 bytes). Nothing was delivered.",
    larger: "rank 1 is at gather blocks.3 (2,048 bytes), rank 0 at gather blocks.3 (1,024 bytes).",
    smaller: "rank 1 is at gather blocks.3 (8 bytes), rank 0 at gather blocks.3 (1,024 bytes).",
    empty: "rank 1 is at gather blocks.3 (0 bytes), rank 0 at gather blocks.3 (1,024 bytes).",
    another_kind: "rank 1 is at gather blocks.3 (reduce_scatter, 1,024 bytes), "
    "rank 0 at gather blocks.3 (all_gather, 1,024 bytes).",
    another_root: "rank 1 is at broadcast blocks.3 (broadcast from rank 1, 16 bytes), "
    "rank 0 at broadcast blocks.3 (broadcast from rank 0, 16 bytes).",
    agreeing: "rank 1 is at agree (0 bytes), rank 0 at gather blocks.3 (1,024 bytes).",
    issued_ahead: "collective 20 differs: rank 1 is at gather blocks.22 (168 bytes), "
    "rank 0 at gather blocks.21 (168 bytes). The last one in common was gather blocks.20.",
    closed: "rank 1 has left (it closed its communicator after 0 collectives) while rank 0 "
    "waits at gather blocks.3 (collective 0, 1,024 bytes), which cannot complete.",
    raised: "rank 1 has left (it raised ValueError('the loader found no file') after 0 "
    "collectives) while rank 0 waits at gather blocks.3 (collective 0, 1,024 bytes), "
    "which cannot complete.",
}


def try_differences(
    rank: int, world: int, folder: str, transport: str
) -> dict[str, tuple[float, str, float, str]]:
    """For each: seconds until the error, its text, and the same for the next call."""
    look_soon()
    with gloo_group(rank, world, folder):
        results = {}
        for difference in DIFFERENCES:
            with over(dist.group.WORLD, transport=transport) as comm:
                first = error_of(lambda: difference(comm))  # noqa: B023 - called at once
                again = error_of(lambda: gather(comm, "blocks.9"))
                results[difference.__name__] = (*first, *again)
        return results


def error_of(act: Callable[[], None]) -> tuple[float, str]:
    start = time.monotonic()
    with pytest.raises(RanksDisagree) as error:
        act()
    return time.monotonic() - start, str(error.value)


@cache
def differences(transport: str) -> list[Outcome]:
    return outcomes_of(2, try_differences, transport)


@pytest.mark.spawn
@pytest.mark.parametrize("difference", DIFFERENCES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_differ_soon_raise_the_same_error(
    difference: Callable[[Comm], None], transport: str
) -> None:
    outcomes = differences(transport)
    assert [(o.error, o.exitcode) for o in outcomes] == [("", 0)] * 2
    (seconds, text, again, again_text), of_rank_1 = (o.value[difference.__name__] for o in outcomes)
    assert DIFFERENCES[difference] in text
    assert "This group cannot be used any more." in text
    assert seconds < SOON
    assert (again_text, again < SOON) == (text, True)
    if difference not in {closed, raised}:  # there, rank 1 knows well enough
        assert of_rank_1[1] == of_rank_1[3] == text
        assert of_rank_1[0] < SOON


# --- ranks that are slow, and ranks that are gone --------------------------------------------


def train_longer(rank: int, world: int, folder: str, transport: str) -> tuple[float, str]:
    with gloo_group(rank, world, folder), over(dist.group.WORLD, transport=transport) as comm:
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
        sw.shard(model, comm=comm)

        def act() -> None:
            for _ in range(4 if rank else 2):
                model(torch.randn(4, 8)).sum().backward()
            model.state_dict()

        return error_of(act)


@pytest.mark.spawn
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_was_gathered_ahead_does_not_keep_a_rank_from_raising(transport: str) -> None:
    """Connections that closed fail one wait; the next one went on to gloo's own time limit."""
    outcomes = outcomes_of(3, train_longer, transport)
    assert [outcome.error for outcome in outcomes] == [""] * 3
    assert all(outcome.value[0] < SOON for outcome in outcomes)
    assert len({outcome.value[1] for outcome in outcomes}) == 1


def be_slow(rank: int, world: int, folder: str, transport: str) -> list[str]:
    look_soon()
    raised = Path(folder, "raised")
    with gloo_group(rank, world, folder), over(dist.group.WORLD, transport=transport) as patient:
        gather(patient, "blocks.0")
        if rank == 1:
            time.sleep(0.3)
        gather(patient, "blocks.1")
        with over(dist.group.WORLD, timeout=1.0, transport=transport) as impatient:
            if rank == 1:
                wait_for(raised.exists, SOON)
            late = error_of(lambda: gather(impatient, "blocks.2"))[1]
            raised.touch()
        gather(patient, "blocks.3")
        return [late]


@pytest.mark.spawn
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_slow_rank_is_waited_for_until_the_time_limit(transport: str) -> None:
    (first, second) = outcomes_of(2, be_slow, transport)
    assert (first.error, second.error) == ("", "")
    assert first.value == second.value
    assert "rank 1 has not come within" in first.value[0]
    assert "while rank 0 waits at gather blocks.2 (collective 0, 1,024 bytes)" in first.value[0]
    assert "connect(timeout=…)" in first.value[0]


def come_alone(rank: int, world: int, folder: str, transport: str) -> tuple[str, int]:
    before, raised = threading.active_count(), Path(folder, "raised")
    with gloo_group(rank, world, folder):
        if rank == 0:
            with pytest.raises(RanksDisagree) as error:
                over(dist.group.WORLD, timeout=0.5, transport=transport)
            text = str(error.value)
            raised.touch()
        else:
            text = ""
            wait_for(raised.exists, SOON)
        return text, threading.active_count() - before


@pytest.mark.spawn
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_never_makes_its_end_is_named_and_nothing_is_left_running(
    transport: str,
) -> None:
    alone, _ = outcomes_of(2, come_alone, transport)
    text, threads = alone.value
    assert text.startswith("rank 1 has not come within")
    assert "while rank 0 waits at start. This group" in text
    assert threads == 0


def be_killed(rank: int, world: int, folder: str, transport: str) -> tuple[float, str]:
    with gloo_group(rank, world, folder), over(dist.group.WORLD, transport=transport) as comm:
        gather(comm, "blocks.2")
        if rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return error_of(lambda: gather(comm, "blocks.3"))


@pytest.mark.spawn
@pytest.mark.parametrize("transport", [*TRANSPORTS, "native"])
def test_a_killed_rank_is_named_within_seconds(transport: str) -> None:
    outcomes = outcomes_of(3, be_killed, transport)
    assert [o.exitcode for o in outcomes] == [0, -signal.SIGKILL, 0]
    (seconds, text), (their_seconds, their_text) = outcomes[0].value, outcomes[2].value
    assert text == their_text
    assert text.startswith("rank 1 ended without a reason (killed, crashed or disconnected) while")
    assert "waits at gather blocks.3 (collective 1, 1,536 bytes)" in text
    assert max(seconds, their_seconds) < SOON


def be_killed_before_agreeing(
    rank: int, world: int, folder: str, transport: str
) -> tuple[float, str]:
    with gloo_group(rank, world, folder), over(dist.group.WORLD, transport=transport) as comm:
        comm.agree({"seed": "1"})
        if rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return error_of(lambda: comm.agree({"seed": "2"}))


@pytest.mark.spawn
@pytest.mark.parametrize("transport", [*TRANSPORTS, "native"])
def test_a_killed_rank_is_named_when_the_others_agree(transport: str) -> None:
    """What ranks agree on goes through a store, which does not know who still lives."""
    outcomes = outcomes_of(3, be_killed_before_agreeing, transport)
    assert [o.exitcode for o in outcomes] == [0, -signal.SIGKILL, 0]
    (seconds, text), (their_seconds, their_text) = outcomes[0].value, outcomes[2].value
    assert text == their_text
    assert text.startswith("rank 1 ended without a reason (killed, crashed or disconnected) while")
    assert max(seconds, their_seconds) < SOON


KEPT: list[object] = []  # what a process holds until its end


def end_early(rank: int, world: int, folder: str, transport: str) -> tuple[float, str] | None:
    atexit._clear()  # as Python 3.13 does in every process that it forks
    with gloo_group(rank, world, folder):
        comm = over(dist.group.WORLD, transport=transport)
        KEPT.append(comm)
        gather(comm, "blocks.2")
        flying = comm.all_gather(torch.zeros(2 << 20), Label("gather", "blocks.3"))
        if rank == 1:
            return None  # closes nothing, and waits for nothing
        flying.wait()
        return error_of(lambda: gather(comm, "blocks.4"))


@pytest.mark.spawn
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_end_of_a_process_is_told_to_those_who_wait(transport: str) -> None:
    waits, ends = outcomes_of(2, end_early, transport)
    assert (ends.error, ends.exitcode, waits.error, waits.exitcode) == ("", 0, "", 0)
    seconds, text = waits.value
    assert "rank 1 has left (its process ended normally after 2 collectives)" in text
    assert "while rank 0 waits at gather blocks.4 (collective 2, 1,024 bytes)" in text
    assert seconds < SOON


def end_within_a_message(rank: int, world: int, folder: str, is_killed: bool) -> object:
    """Rank 1 ends when a part of its long message has come to rank 0, which does not yet wait."""
    posted = Path(folder, "posted")
    with gloo_group(rank, world, folder):
        comm = over(dist.group.WORLD, transport="messages")
        KEPT.append(comm)
        full = torch.full([8 << 20], float(rank))
        if rank == 0:
            flying = comm.all_gather(full, Label("gather", "blocks.3"))
            posted.with_name(f"{os.getpid()}.pid").touch()
            posted.touch()
            time.sleep(1.5)
            if is_killed:
                return error_of(flying.wait)
            flying.wait()
            return full.sum().item()
        wait_for(posted.exists, SOON)
        (peer,) = (int(path.stem) for path in posted.parent.glob("*.pid"))
        os.kill(peer, signal.SIGSTOP)
        subprocess.Popen(["sh", "-c", f"sleep 0.7; kill -CONT {peer}"])
        KEPT.append(comm.all_gather(full, Label("gather", "blocks.3")))
        if is_killed:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        return None


@pytest.mark.spawn
def test_a_rank_that_is_killed_within_a_message_is_named_within_seconds() -> None:
    """gloo leaves a message of which a part has come to its own timeout of half an hour."""
    waits, ends = outcomes_of(2, end_within_a_message, True)
    assert (waits.error, ends.exitcode) == ("", -signal.SIGKILL)
    seconds, text = waits.value
    assert text.startswith("rank 1 ended without a reason (killed, crashed or disconnected) while")
    assert seconds < SOON


@pytest.mark.spawn
def test_the_last_message_of_a_process_that_ends_arrives() -> None:
    waits, ends = outcomes_of(2, end_within_a_message, False)
    assert (waits.error, ends.error, ends.exitcode) == ("", "", 0)
    assert waits.value == 4 << 20


# --- between threads ---------------------------------------------------------------------------


class Unconnected:
    """A stand-in for gloo's process group: nothing can be sent."""

    def __init__(self) -> None:
        self.tags: list[int] = []

    def recv(self, buffers: object, peer: int, tag: int) -> None:
        self.tags.append(tag)
        raise RuntimeError("not connected")


def test_no_rank_goes_on_before_all_have_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    connected: list[tuple[int, float]] = []
    groups = [Unconnected(), Unconnected()]

    def slow_on_rank_1(store: object, rank: int, size: int, timeout: timedelta) -> Unconnected:
        time.sleep(0.2 * rank)
        connected.append((rank, timeout.total_seconds()))
        return groups[rank]

    monkeypatch.setattr(gloo, "ProcessGroupGloo", slow_on_rank_1)
    store = HashStore()

    def rank(threads: Comm) -> list[tuple[int, float]]:
        with gloo.GlooComm(threads.rank, 2, store, 60.0) as comm:
            came = sorted(connected)
        assert groups[threads.rank].tags == [NO_TAG]  # which ends what is in flight
        assert comm._group is None
        return came

    assert run_threads(2, rank) == [[(0, 120.0), (1, 120.0)]] * 2


def test_a_message_that_cannot_be_issued_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "ProcessGroupGloo", lambda *_: Unconnected())
    store = HashStore()

    def rank(threads: Comm) -> str:
        with gloo.GlooComm(threads.rank, 2, store, 60.0) as comm:
            text = error_of(lambda: gather(comm, "blocks.0"))[1] if threads.rank == 0 else ""
            threads.agree({})  # rank 1 has not left before
            return text

    text, _ = run_threads(2, rank)
    assert text.startswith("rank 1 ended without a reason (killed, crashed or disconnected) while")


def test_after_a_collective_nothing_is_waited_for_and_nothing_is_kept() -> None:
    store = HashStore()

    def rank(threads: Comm) -> list[object]:
        with gloo.GlooComm(threads.rank, 2, store, 60.0) as comm:
            full = torch.zeros(2)
            full[comm.rank] = comm.rank + 1.0
            comm.all_gather(full, Label("gather")).wait()
            threads.agree({})  # the other rank has it, too, before either closes
            return [full.tolist(), comm._watchdog.waits, comm._works]

    assert run_threads(2, rank) == [[[1.0, 2.0], None, {}]] * 2


def test_a_rank_that_never_starts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "POLL_INTERVAL", 0.01)
    monkeypatch.setattr(watchdog, "FIRST_CHECK", 0.05)
    with pytest.raises(RanksDisagree, match="rank 1 has not come within 0 s while rank 0 waits at"):
        gloo.GlooComm(0, 2, HashStore(), 0.1)


def batch_threads(rank: int, world: int, folder: str) -> tuple[bool, list[int]]:
    """Is gloo's thread a batch thread, and which of Python's threads are?"""
    with gloo_group(rank, world, folder):
        before = set(Path("/proc/self/task").iterdir())
        with over(dist.group.WORLD, transport="messages") as comm:
            gather(comm, "blocks.0")  # by then the thread that carries it has its name
            tasks = set(Path("/proc/self/task").iterdir()) - before
            (loop,) = [t for t in tasks if (t / "comm").read_text().strip() == "gloo_tcp_loop"]
            ours = [one.native_id for one in threading.enumerate() if one.native_id is not None]
            batch = [one for one in ours if os.sched_getscheduler(one) == os.SCHED_BATCH]
            return os.sched_getscheduler(int(loop.name)) == os.SCHED_BATCH, batch


@pytest.mark.spawn
def test_gloos_threads_take_no_core_from_a_thread_that_computes() -> None:
    assert [outcome.value for outcome in outcomes_of(2, batch_threads)] == [(True, [])] * 2


def test_a_group_is_made_where_the_class_of_threads_cannot_be_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    test_after_a_collective_nothing_is_waited_for_and_nothing_is_kept()
