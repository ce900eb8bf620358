"""Freed memory stays mapped, unless the user chose otherwise, and can be given back."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from mmap import PAGESIZE
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.comm import malloc
from shardwise.comm.malloc import in_huge_pages, keep_mapped, trim
from tests.forked import forked


@forked
def test_freed_memory_stays_mapped() -> None:
    """Writing again to what was freed comes to fault in no page.

    Not at once: what else is allocated in between may first split a freed piece.
    """
    kept, faults = in_a_new_process(AGAIN).split()
    assert kept == "True"
    assert int(faults) < 100


@pytest.mark.prove
def test_what_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "131072")
    kept, faults = in_a_new_process(AGAIN).split()
    assert kept == "False"
    assert int(faults) > 1000


@forked
def test_freed_gradients_make_room_for_the_next() -> None:
    """One of 16 MiB lives at a time, and three are touched; without joining five or six."""
    assert int(in_a_new_process(GRADIENTS)) < 66


GRADIENTS = """
import torch
from pathlib import Path
from torch import nn
from shardwise.comm.malloc import join_freed, keep_mapped
def held():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(x.split()[1]) >> 10 for x in lines if x.startswith("Anonymous"))
def drop(param):
    join_freed(param.grad.nbytes)
    param.grad = None
weight = torch.randn(2048, 2048) / 45
layers = [nn.Linear(2048, 2048, bias=False, device="meta") for _ in range(6)]
for layer in layers:
    layer.weight = nn.Parameter(weight)
    layer.weight.register_post_accumulate_grad_hook(drop)
keep_mapped()
before = held()
for _ in range(4):
    nn.Sequential(*layers)(torch.randn(4, 2048)).sum().backward()
    join_freed(weight.nbytes)
print(held() - before)
"""


@pytest.mark.parametrize(
    ("kept", "nbytes", "joins"), [(0, 1 << 22, 0), (1, 1 << 21, 0), (1, 1 << 22, 1)]
)
def test_only_where_large_blocks_stay_mapped(
    monkeypatch: pytest.MonkeyPatch, kept: bool, nbytes: int, joins: bool
) -> None:
    freed = list[int]()
    pieces = itertools.count()
    small = SimpleNamespace(malloc=lambda _: next(pieces), free=freed.append)
    monkeypatch.setattr(malloc, "_small", small)
    monkeypatch.setattr(malloc, "_kept", threading.Event())
    if kept:
        malloc._kept.set()
    malloc.join_freed(nbytes)
    assert sorted(freed) == list(range(len(freed)))  # each once
    assert bool(freed) == joins


AGAIN = """
import resource, torch
from shardwise.comm.malloc import keep_mapped
kept, faults = keep_mapped(), []
for _ in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    many = [torch.empty(3 << 20).fill_(1.0) for _ in range(8)]  # 96 MiB
    after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    del many
    faults.append(after - before)
print(kept, min(faults[2:]))
"""


def in_a_new_process(text: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=240
    )
    return done.stdout.strip()


@forked
def test_what_was_freed_can_be_given_back() -> None:
    """Even where it is kept mapped, and something that stays lies above it."""
    assert int(in_a_new_process(HELD)) < 8 << 20


HELD = """
import torch
from pathlib import Path
from shardwise.comm.malloc import trim, keep_mapped
def held():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(x.split()[1]) << 10 for x in lines if x.startswith("Anonymous"))
keep_mapped()
before = held()
unit, shard = torch.empty(64 << 20, dtype=torch.uint8).fill_(1), torch.ones(1 << 20)
del unit
trim()
print(held() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux tells what it was advised")
def test_large_memory_is_asked_for_in_huge_pages() -> None:
    large, small = torch.empty(8 << 20, dtype=torch.uint8), torch.empty(1 << 20, dtype=torch.uint8)
    assert in_huge_pages(large) is large
    assert in_huge_pages(small) is small
    if "hg" not in _flags(large.data_ptr() + (4 << 20)):
        pytest.skip("this kernel has no huge pages to advise")


def calls_of(
    monkeypatch: pytest.MonkeyPatch, name: str, accepts: Callable[..., bool] = lambda *_: True
) -> list[tuple[int, ...]]:
    """The arguments with which ``name`` is called from now on, of a C library that has no other."""
    calls: list[tuple[int, ...]] = []

    def called(*given: Any) -> int:
        calls.append(tuple(getattr(one, "value", one) for one in given))
        return int(accepts(*given))

    monkeypatch.setattr(malloc, "_libc", SimpleNamespace(**{name: called}))
    monkeypatch.setattr(malloc, "_kept", threading.Event())
    for variable in malloc.USER_SETTINGS:
        monkeypatch.delenv(variable, raising=False)
    return calls


M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1  # of glibc's malloc.h


@pytest.mark.parametrize(
    ("largest", "kept", "expected"),
    [
        (1 << 30, True, [(M_MMAP_THRESHOLD, 1 << 30), (M_TRIM_THRESHOLD, 1 << 30)]),
        (
            1 << 25,
            True,
            [(M_MMAP_THRESHOLD, 1 << 30), (M_MMAP_THRESHOLD, 1 << 25), (M_TRIM_THRESHOLD, 1 << 30)],
        ),
        (0, False, [(M_MMAP_THRESHOLD, 1 << 30), (M_MMAP_THRESHOLD, 1 << 25)]),
    ],
)
def test_both_thresholds_are_set_or_none(
    monkeypatch: pytest.MonkeyPatch, largest: int, kept: bool, expected: list[tuple[int, ...]]
) -> None:
    """Once one of them is set, glibc no longer adapts the other."""

    def accepts(option: int, nbytes: int) -> bool:
        return option == M_TRIM_THRESHOLD or nbytes <= largest

    calls = calls_of(monkeypatch, "mallopt", accepts)
    assert keep_mapped() is kept
    assert calls == expected
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=0")
    assert keep_mapped() is False
    monkeypatch.delenv("GLIBC_TUNABLES")
    monkeypatch.setenv("LD_PRELOAD", "libjemalloc.so")
    assert keep_mapped() is False
    assert calls == expected


def test_a_c_library_without_these_calls_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(monkeypatch, "malloc_trim")
    assert keep_mapped() is False
    assert in_huge_pages(torch.empty(1 << 21, dtype=torch.uint8)).nbytes == 1 << 21
    trim()
    assert calls == [(0,)]  # down to the last byte
    calls_of(monkeypatch, "another")
    trim()


def test_from_2_mib_on_all_pages_of_a_tensor_are_asked_to_be_huge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = calls_of(monkeypatch, "madvise")
    memory = torch.empty((1 << 21) + PAGESIZE, dtype=torch.uint8)
    in_huge_pages(memory[: (1 << 21) - 1])
    in_huge_pages(torch.empty(1 << 22, device="meta"))
    assert calls == []
    for first in (100, -memory.data_ptr() % PAGESIZE):  # inside a page, and at its beginning
        tensor = memory[first : first + (1 << 21)]
        in_huge_pages(tensor)
        start, nbytes, advice = calls.pop()
        assert (start % PAGESIZE, advice) == (0, 14)
        assert start <= tensor.data_ptr() < start + PAGESIZE
        assert start + nbytes == tensor.data_ptr() + tensor.nbytes


def _flags(address: int) -> str:
    """Of the mapping that holds this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags"):
            return line
    return ""
