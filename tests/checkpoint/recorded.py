"""Which files are synced and which get their names, in order, for the tests beside this."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def record(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls from here on: ``"fsync /its/path"`` and ``"rename its-new-name"``."""
    calls: list[str] = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def synced(opened: int) -> None:
        calls.append(f"fsync {Path(f'/proc/self/fd/{opened}').readlink()}")
        fsync(opened)

    def renamed(self: Path, target: Path) -> Path:
        calls.append(f"rename {Path(target).name}")
        return rename(self, target)

    def replaced(self: Path, target: Path) -> Path:
        calls.append(f"rename {Path(target).name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(Path, "replace", replaced)
    return calls
