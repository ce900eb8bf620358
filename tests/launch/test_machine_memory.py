"""The memory of this machine, of which a container may have a part."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.launch import machine_memory as memory
from shardwise.launch.machine_memory import machine_memory


def test_memory_is_what_this_container_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "LIMITS", ())
    whole = machine_memory()
    assert whole > 2**28
    for text, expected in (("max", whole), ("1048576", 2**20)):
        (tmp_path / "memory.max").write_text(text + "\n", "ascii")
        monkeypatch.setattr(memory, "LIMITS", (str(tmp_path / "memory.max"), "/nowhere"))
        assert machine_memory() == expected


def test_swap_holds_no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LIMITS", ())
    meminfo = "MemTotal: 1 kB\nSwapTotal: 4096 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda *_: meminfo)
    monkeypatch.setattr(Path, "exists", lambda _: True)
    assert machine_memory() == machine_memory(pinned=True) + (4 << 20)
