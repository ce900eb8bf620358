"""The same laws (laws.py) over every Comm: one rank alone, threads, gloo messages, native calls."""

from __future__ import annotations

import traceback
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.connect import over
from shardwise.comm.local import LocalComm
from shardwise.comm.native import NativeComm
from shardwise.comm.peers import PeerComm
from shardwise.comm.protocol import Comm
from tests.comm import laws
from tests.comm.laws import LAWS, NATIVE_LAWS, Law
from tests.ranks import gloo_group, outcomes_of, run_threads

WORLDS_OF_PROCESSES = [2, 3]

# law → (what came out, the error's text or "")
Kept = dict[str, tuple[list[bytes], str]]


def keep(comm: Comm, laws: list[Law]) -> Kept:
    """Every law in turn, so that one start of the processes serves them all."""
    kept: Kept = {}
    for law in laws:
        try:
            kept[law.__name__] = ([bits(tensor) for tensor in law(comm)], "")
        except Exception:  # noqa: BLE001 - reported by the test of this law
            kept[law.__name__] = ([], traceback.format_exc())
    return kept


def bits(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def both_kinds(rank: int, world: int, folder: str) -> tuple[Kept, Kept]:
    torch.set_num_threads(1)
    with gloo_group(rank, world, folder):
        with over(dist.group.WORLD) as tagged:
            assert type(tagged) is PeerComm
            first = keep(tagged, LAWS)
        with over(dist.group.WORLD, transport="native") as native:
            assert type(native) is NativeComm
            return first, keep(native, NATIVE_LAWS)


started = cache(outcomes_of)  # once, also if it went wrong


def processes(world: int) -> list[tuple[Kept, Kept]]:
    outcomes = started(world, both_kinds)
    assert [(o.error, o.exitcode) for o in outcomes] == [("", 0)] * world
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("law", LAWS)
def test_one_rank_alone_keeps_the_law(law: Law) -> None:
    law(LocalComm())


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("law", LAWS)
def test_threads_keep_the_law(law: Law, world: int) -> None:
    run_threads(world, law)


@pytest.mark.spawn
@pytest.mark.parametrize("world", WORLDS_OF_PROCESSES)
@pytest.mark.parametrize("law", LAWS)
def test_gloo_messages_keep_the_law(law: Law, world: int) -> None:
    assert [tagged[law.__name__][1] for tagged, _ in processes(world)] == [""] * world


@pytest.mark.spawn
@pytest.mark.parametrize("world", WORLDS_OF_PROCESSES)
@pytest.mark.parametrize("law", NATIVE_LAWS)
def test_native_calls_keep_the_law(law: Law, world: int) -> None:
    assert [native[law.__name__][1] for _, native in processes(world)] == [""] * world


@pytest.mark.spawn
@pytest.mark.parametrize("world", WORLDS_OF_PROCESSES)
def test_threads_and_gloo_messages_give_the_same_bits(world: int) -> None:
    by_threads = run_threads(world, keep, LAWS)
    for threads, (messages, _) in zip(by_threads, processes(world), strict=True):
        for law, (came_out, _) in threads.items():
            assert came_out == messages[law][0], law


def test_the_order_of_summation_shows_in_these_values() -> None:
    # Otherwise the law about rank order could not fail.
    parts = [laws.values(rank, 100, torch.float32) for rank in range(3)]
    forwards = laws.summed(parts, torch.float32)
    assert not torch.equal(forwards, laws.summed(parts[::-1], torch.float32))
