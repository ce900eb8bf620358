"""The same laws (laws.py) over every Comm: one rank, threads, messages, memory, native calls."""

from __future__ import annotations

import traceback
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.machine.connect import over
from shardwise.comm.protocol import Comm
from shardwise.comm.transports import shared_memory
from shardwise.comm.transports.backend import BackendComm
from shardwise.comm.transports.gloo import GlooComm
from shardwise.comm.transports.local import LocalComm
from shardwise.comm.transports.shared_memory import SharedMemoryComm
from tests.comm import laws
from tests.comm.laws import LAWS, NATIVE_LAWS, Law
from tests.ranks import gloo_group, outcomes_of, run_sharing, run_threads

WORLDS_OF_PROCESSES = [2, 3]
KINDS: dict[str, type] = {"messages": GlooComm, "memory": SharedMemoryComm, "native": BackendComm}

# law → (what came out, the error's text or "")
Kept = dict[str, tuple[list[bytes], str]]


def keep(comm: Comm, laws: list[Law]) -> Kept:
    """Every law in turn, so that one start of the processes serves them all."""
    results: Kept = {}
    for law in laws:
        try:
            results[law.__name__] = ([bits(tensor) for tensor in law(comm)], "")
        except Exception:  # noqa: BLE001 - reported by the test of this law
            results[law.__name__] = ([], traceback.format_exc())
    return results


def bits(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def all_kinds(rank: int, world: int, folder: str) -> dict[str, Kept]:
    torch.set_num_threads(1)
    results = {}
    with gloo_group(rank, world, folder):
        for transport, kind in KINDS.items():
            with over(dist.group.WORLD, transport=transport) as comm:
                assert type(comm) is kind
                results[transport] = keep(comm, NATIVE_LAWS if transport == "native" else LAWS)
        with over(dist.group.WORLD) as comm:
            assert type(comm) is SharedMemoryComm  # what "auto" finds on one host
    return results


started = cache(outcomes_of)  # once, also if it went wrong


def processes(world: int, transport: str) -> list[Kept]:
    outcomes = started(world, all_kinds)
    assert [(o.error, o.exitcode) for o in outcomes] == [("", 0)] * world
    return [outcome.value[transport] for outcome in outcomes]


@pytest.mark.parametrize("law", LAWS)
def test_one_rank_alone_keeps_the_law(law: Law) -> None:
    law(LocalComm())


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("law", LAWS)
def test_threads_keep_the_law(law: Law, world: int) -> None:
    run_threads(world, law)


@pytest.mark.parametrize("law", LAWS)
def test_shared_memory_keeps_the_law_where_more_is_in_flight_than_it_has_rows(
    law: Law, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "ROWS", 2)
    run_sharing(3, law)


@pytest.mark.spawn
@pytest.mark.parametrize("world", WORLDS_OF_PROCESSES)
@pytest.mark.parametrize("transport", ["messages", "memory"])
@pytest.mark.parametrize("law", LAWS)
def test_processes_keep_the_law(law: Law, transport: str, world: int) -> None:
    assert [results[law.__name__][1] for results in processes(world, transport)] == [""] * world


@pytest.mark.spawn
@pytest.mark.parametrize("world", WORLDS_OF_PROCESSES)
@pytest.mark.parametrize("law", NATIVE_LAWS)
def test_native_calls_keep_the_law(law: Law, world: int) -> None:
    assert [results[law.__name__][1] for results in processes(world, "native")] == [""] * world


@pytest.mark.spawn
@pytest.mark.parametrize("world", WORLDS_OF_PROCESSES)
@pytest.mark.parametrize("transport", ["messages", "memory"])
def test_threads_and_processes_give_the_same_bits(transport: str, world: int) -> None:
    by_threads = run_threads(world, keep, LAWS)
    for threads, results in zip(by_threads, processes(world, transport), strict=True):
        for law, (came_out, _) in threads.items():
            assert came_out == results[law][0], law


def test_the_order_of_summation_shows_in_these_values() -> None:
    # Otherwise the law about rank order could not fail.
    parts = [laws.values(rank, 100, torch.float32) for rank in range(3)]
    forwards = laws.summed(parts, torch.float32)
    assert not torch.equal(forwards, laws.summed(parts[::-1], torch.float32))
