"""Freed memory can be given back, and large memory be in huge pages."""

from __future__ import annotations

import re
import subprocess
import sys
from mmap import PAGESIZE
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.comm import malloc
from shardwise.comm.malloc import in_huge_pages, map_blocks, trim
from tests.forked import forked


def in_a_new_process(text: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=240
    )
    return done.stdout.strip()


@forked
def test_a_step_changes_no_setting_of_glibc() -> None:
    """A step of several ranks changes no setting of glibc's, so what is freed is not kept."""
    assert int(in_a_new_process(GRADIENTS)) < 16


GRADIENTS = """
import torch
from pathlib import Path
import shardwise as sw
from tests.fake import FakeComm
def held():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(x.split()[1]) >> 10 for x in lines if x.startswith("Anonymous"))
model = torch.nn.Linear(4, 4)
sw.shard(model, comm=FakeComm(0, 2))
for _ in range(2):
    model(torch.ones(4, 4)).sum().backward()
before = held()
for _ in range(6):
    gradient = torch.ones(16 << 20)
    del gradient
print(held() - before)
"""


@forked
def test_what_was_freed_can_be_given_back() -> None:
    """Even where something that stays lies above it."""
    assert int(in_a_new_process(HELD.format(first="", last="trim()"))) < 8 << 20


HELD = """
import torch
from pathlib import Path
from shardwise.comm.malloc import map_blocks, trim
def held():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(x.split()[1]) << 10 for x in lines if x.startswith("Anonymous"))
{first}
before = held()
pairs = [
    (torch.ones(100 << 10, dtype=torch.uint8), torch.ones(1 << 8)) for _ in range(640)
]  # 64 MiB of units, from the heap, and a shard above each
units, shards = zip(*pairs)
del pairs, units
{last}
print(held() - before)
"""


@forked
def test_blocks_that_are_mapped_leave_no_hole() -> None:
    """Those of the size that was said and larger ones; what is smaller stays with the process."""
    assert int(in_a_new_process(HELD.format(first="map_blocks(100 << 10)", last=""))) < 8 << 20
    assert int(in_a_new_process(HELD.format(first="map_blocks(200 << 10)", last=""))) > 32 << 20


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux tells what it was advised")
def test_large_memory_is_asked_for_in_huge_pages() -> None:
    large, small = torch.empty(8 << 20, dtype=torch.uint8), torch.empty(1 << 20, dtype=torch.uint8)
    assert in_huge_pages(large) is large
    assert in_huge_pages(small) is small
    if "hg" not in _flags(large.data_ptr() + (4 << 20)):
        pytest.skip("this kernel has no huge pages to advise")


def calls_of(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[int, ...]]:
    """The arguments with which ``name`` is called from now on, of a C library that has no other."""
    calls: list[tuple[int, ...]] = []

    def called(*given: Any) -> int:
        calls.append(tuple(getattr(one, "value", one) for one in given))
        return 1

    monkeypatch.setattr(malloc, "_libc", SimpleNamespace(**{name: called}))
    return calls


def test_a_c_library_without_these_calls_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(monkeypatch, "malloc_trim")
    assert in_huge_pages(torch.empty(1 << 21, dtype=torch.uint8)).nbytes == 1 << 21
    trim()
    assert calls == [(0,)]  # down to the last byte
    calls_of(monkeypatch, "another")
    trim()
    map_blocks(1)


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
    """The flags of the mapping that holds this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= address < int(match[2], 16)
        elif inside and line.startswith("VmFlags"):
            return line
    return ""
