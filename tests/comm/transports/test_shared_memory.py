"""Ranks of one host over shared memory: parameters exist once, gathers move nothing, same bits."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import resource
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

import shardwise as sw
from shardwise.comm.machine.connect import over
from shardwise.comm.protocol import Comm, Label, Pending
from shardwise.comm.transports import shared_memory as module
from shardwise.comm.transports.arena import Arena
from shardwise.comm.transports.gloo import GlooComm
from shardwise.comm.transports.shared_memory import SharedMemoryComm
from shardwise.comm.watchdog import watchdog
from shardwise.errors import ConfigError, RanksDisagree
from tests.copies import local
from tests.nets import loss, tied_decoder, tied_decoder_batch
from tests.ranks import gloo_group, outcomes_of, run_sharing, run_threads
from tests.steps import STRATEGIES


def train(comm: Comm, strategy: str, compute: torch.dtype | None) -> tuple[list[float], Any]:
    """Losses and final states of three steps with evaluation in between, and bytes sent."""
    torch.manual_seed(0)
    model = tied_decoder()
    precision = sw.Precision(param_dtype=compute)
    sharded = sw.shard(model, strategy, comm=comm, precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        with torch.no_grad():
            losses.append(loss(model, tied_decoder_batch(99, 2)).item())
        for micro in range(2):
            with sharded.accumulate(last=micro == 1):
                value = loss(model, tied_decoder_batch(10 * step + 2 * comm.rank + micro, 2))
                (value / 2).backward()
        sharded.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses, {k: v.tolist() for k, v in model.state_dict().items()}


def train_over_both(rank: int, world: int, folder: str) -> list[Any]:
    """Train for each dtype: over messages in one strategy, then over shared memory in each."""
    runs = [("messages", "full_shard"), *(("memory", strategy) for strategy in STRATEGIES)]
    with gloo_group(rank, world, folder):
        results = []
        for compute in (None, torch.bfloat16):
            for transport, strategy in runs:
                with over(dist.group.WORLD, transport=transport) as comm:
                    results.append(train(comm, strategy, compute))
        return results


@pytest.mark.prove
@pytest.mark.spawn
@pytest.mark.parametrize("world", [2, 3])
def test_training_gives_the_same_bits_as_over_messages_in_every_strategy(world: int) -> None:
    for outcome in outcomes_of(world, train_over_both):
        assert outcome.error == ""
        half = 1 + len(STRATEGIES)
        fp32, bf16 = outcome.value[:half], outcome.value[half:]
        for messages, *memory in (fp32, bf16):
            assert memory == [messages] * len(STRATEGIES)
        assert fp32[0] != bf16[0]


def one_step(rank: int, world: int, folder: str) -> dict[str, Any]:
    with gloo_group(rank, world, folder), over(dist.group.WORLD) as comm:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)])
        sharded = sw.shard(model, comm=comm)
        comm.counters.reset()
        model(torch.ones(1, 1024)).sum().backward()
        copied = sum(bucket.copied for bucket in sharded.buckets)
        comm.fence(Label("fence", "measured"))
        memory = proportional_bytes()
        comm.fence(Label("fence", "read"))
        schedule = sharded.schedule
        listed = sum(schedule.sent(event) for event in schedule.events)
        return {
            "sent": dict(comm.counters.bytes_sent),
            "listed": listed,
            "copied": copied,
            "memory": memory,
        }


def proportional_bytes() -> int:
    """This process's part of the memory that is mapped from files without a name."""
    maps = Path("/proc/self/smaps").read_text().split("\n")
    nbytes, ours = 0, False
    for line in maps:
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            ours = "memfd:shardwise" in line
        elif ours and line.startswith("Pss:"):
            nbytes += 1024 * int(line.split()[1])
    return nbytes


@pytest.mark.spawn
def test_a_gather_moves_nothing_and_parameters_exist_once_per_host() -> None:
    outcomes = outcomes_of(2, one_step)
    assert [o.error for o in outcomes] == ["", ""]
    model = 16 * 1024 * 1024 * 4
    for outcome in outcomes:
        assert outcome.value["sent"]["gather"] == 0
        assert outcome.value["copied"] == 0
        assert outcome.value["sent"]["reduce"] == outcome.value["listed"] == model // 2
    # Parameters and gradient shards once per host, and per rank a few gradient buckets of 4 MiB.
    total = sum(outcome.value["memory"] for outcome in outcomes)
    assert 2 * model <= total <= 2 * model + 2 * 5 * model // 16


def cast(comm: Comm) -> list[int]:
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    precision = sw.Precision(param_dtype=torch.bfloat16)
    sharded = sw.shard(model, comm=comm, precision=precision)
    copied = []
    for _ in range(2):
        model(torch.ones(1, 64)).sum().backward()
        copied.append(sum(bucket.copied for bucket in sharded.buckets))
    return copied


def test_each_rank_casts_its_slice_once_a_step() -> None:
    slices = 4 * 64 * 64 // 2 * 2  # bytes: half of each layer, in bf16
    assert run_sharing(2, cast) == [[slices, 2 * slices]] * 2


def cannot_share(rank: int, world: int, folder: str) -> tuple[bool, str]:
    module.proc_namespace = partial(str, rank)
    with gloo_group(rank, world, folder):
        with over(dist.group.WORLD) as comm:
            fell_back = type(comm) is GlooComm
        with pytest.raises(ConfigError) as error:
            over(dist.group.WORLD, transport="memory")
        return fell_back, str(error.value)


@pytest.mark.spawn
def test_ranks_on_several_hosts_fall_back_to_messages() -> None:
    for outcome in outcomes_of(2, cannot_share):
        fell_back, text = outcome.value
        assert fell_back
        assert text.startswith("the 2 ranks cannot map each other's memory")


def test_nothing_of_it_has_a_name_in_dev_shm() -> None:
    assert not list(Path("/dev/shm").glob("*shardwise*"))


def relayouts(comm: SharedMemoryComm) -> list[int]:
    """How much of the common memory was ever in use after each of six, in bytes."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    sharded = sw.shard(model, comm=comm)
    weight = model.get_parameter("0.weight")
    detached = local(weight.detach()) if comm.rank == 1 else torch.empty(0)
    values, used = detached.clone(), []
    for frozen in (True, False) * 3:
        weight.requires_grad_(not frozen)  # other buckets, of other sizes
        sharded.relayout()
        used.append(comm._common_heap._ranges.free[-1][0])
        model(torch.ones(1, 64)).sum().backward()
    assert torch.equal(detached, values)  # what a user looks at is not given out again
    return used


def test_a_layout_takes_the_place_of_the_one_before() -> None:
    for used in run_sharing(2, relayouts):
        assert used[2:] == [used[1]] * 4


def test_a_process_with_many_open_files_still_sees_that_a_peer_has_ended() -> None:
    def rank(comm: Comm) -> bool:
        assert isinstance(comm, SharedMemoryComm)
        peer = 1 - comm.rank
        comm._pidfds[peer] = fcntl.fcntl(comm._pidfds[peer], fcntl.F_DUPFD, 1024)
        return comm._is_gone(peer)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    assert run_sharing(2, rank) == [False, False]


class Slow(nn.Module):
    """Computes late on rank 1, once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.delay = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sleep(self.delay)
        result: torch.Tensor = self.linear(x)
        return result


def step_while_a_peer_computes(comm: Comm) -> list[float]:
    slow = Slow()
    model = nn.Sequential(slow, nn.Linear(4, 4))
    for param in model.parameters():
        nn.init.ones_(param)
    sw.shard(model, comm=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(2, 4)).sum().backward()
    slow.delay = 0.5 * comm.rank
    logged = model(torch.ones(2, 4))  # with gradients, and without a backward pass
    optimizer.step()
    return list(logged[0].tolist())


def test_no_rank_updates_what_another_still_computes_with() -> None:
    assert run_sharing(2, step_while_a_peer_computes) == [[21.0] * 4] * 2


def test_rows_are_free_again_once_their_texts_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """So rank 0 may issue as many collectives as there are rows before rank 1 issues one."""
    monkeypatch.setattr(module, "ROWS", 512)
    issued = threading.Event()

    def rank(comm: SharedMemoryComm) -> None:
        comm.agree({})
        if comm.rank == 1:
            assert issued.wait(10)
        full = torch.zeros(2)
        flying = [comm.all_gather(full, Label("gather")) for _ in range(512)]
        issued.set()
        for pending in flying:
            pending.wait()

    run_sharing(2, rank, timeout=20.0)


def test_no_rank_starts_before_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "POLL_INTERVAL", 0.01)
    monkeypatch.setattr(watchdog, "FIRST_CHECK", 0.05)
    running = set(threading.enumerate())
    with pytest.raises(RanksDisagree, match="rank 1 has not come within 0 s while rank 0 waits at"):
        module.shared_memory(HashStore(), 0, 2, 0.1)
    assert set(threading.enumerate()) <= running


# --- which ranks can share memory ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "system", "supported"),
    [
        ("x86_64", "Linux", True),
        ("AMD64", "Linux", True),
        ("aarch64", "Linux", False),  # it may show a peer's stores in another order
        ("x86_64", "Darwin", False),
    ],
)
def test_a_processor_has_to_keep_the_order_of_stores(
    monkeypatch: pytest.MonkeyPatch, machine: str, system: str, supported: bool
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "system", lambda: system)
    assert module._is_supported() is supported


def test_a_host_is_a_boot_and_a_namespace_of_processes_or_this_process_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert module.proc_namespace() == f"{boot} {Path('/proc/self/ns/pid').readlink()}"

    def refuse(path: Path) -> str:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "read_text", refuse)
    assert module.proc_namespace() == f"{platform.node()} {os.getpid()}"


def others_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "proc_namespace", lambda: threading.current_thread().name)


def an_arena_that_rank_1_cannot_open(monkeypatch: pytest.MonkeyPatch) -> None:
    open_arena = Arena.open

    def refuse(pid: int, fd: int) -> Arena:
        if threading.current_thread().name == "rank-1":
            raise PermissionError("another user's")
        return open_arena(pid, fd)

    monkeypatch.setattr(Arena, "open", refuse)


def another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_is_supported", lambda: False)


@pytest.mark.parametrize(
    "missing", [others_host, an_arena_that_rank_1_cannot_open, another_processor]
)
def test_no_rank_shares_memory_that_another_cannot_map_and_nothing_is_left_running(
    monkeypatch: pytest.MonkeyPatch, missing: Callable[[pytest.MonkeyPatch], None]
) -> None:
    missing(monkeypatch)
    running, store = set(threading.enumerate()), HashStore()
    comms = run_threads(2, lambda comm: module.shared_memory(store, comm.rank, 2, 60.0))
    assert comms == [None, None]
    assert set(threading.enumerate()) <= running


# --- waiting ------------------------------------------------------------------------------------


def gather(comm: Comm, n: int = 1) -> Pending:
    return comm.all_gather(torch.zeros(comm.size * n), Label("gather"))


def test_a_rank_that_waits_is_woken_when_another_ends_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "FIRST_CHECK", 1000.0)  # no watchdog looks by itself

    def rank(comm: SharedMemoryComm) -> str:
        if comm.rank == 1:
            sleep(0.1)
            return str(comm._fail("the test ends it"))
        with pytest.raises(RanksDisagree) as error:
            gather(comm).wait()
        return str(error.value)

    assert run_sharing(2, rank) == ["the test ends it"] * 2


def test_what_is_in_flight_when_its_comm_closes_raises() -> None:
    def rank(comm: Comm) -> str:
        if comm.rank == 1:
            return ""
        pending = gather(comm)
        comm.close("the test is over")
        with pytest.raises(RanksDisagree) as error:
            pending.wait()
        return str(error.value)

    assert "rank 0 has left this process group (the test is over)" in run_sharing(2, rank)[0]


def test_after_a_late_rank_nothing_is_waited_for() -> None:
    def rank(comm: SharedMemoryComm) -> object:
        sleep(0.05 * comm.rank)
        gather(comm).wait()
        return comm._watchdog.waits

    assert run_sharing(2, rank) == [None, None]


def test_what_a_peer_has_not_read_yet_is_not_overwritten() -> None:
    reads = threading.Event()

    def rank(comm: Comm) -> float:
        data = torch.ones(1000) if comm.rank == 0 else torch.zeros(1000)
        pending = comm.broadcast(data, 0, Label("broadcast"))  # of a copy, in memory of rank 0
        if comm.rank == 0:
            comm.memory.gradient(1000, torch.float32).fill_(7.0)
            reads.set()
        assert reads.wait(10)
        pending.wait()
        return data.sum().item()

    assert run_sharing(2, rank) == [1000.0] * 2
