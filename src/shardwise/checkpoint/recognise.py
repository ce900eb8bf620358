"""Recognition of a folder: by its name, by its manifest, and by the files in it.

A manifest makes a checkpoint, whatever its name. Some names mean something else; and a name
``step-N`` says that shardwise began what has no manifest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path

from shardwise.checkpoint.lock import LOCK
from shardwise.checkpoint.manifest import CAP
from shardwise.checkpoint.manifest import NAME as MANIFEST
from shardwise.checkpoint.safetensors_format import INNER
from shardwise.checkpoint.training_state import NAME as TRAINING

LATEST = "latest"
CHECKPOINTS = "checkpoints"  # where ``shardwise train`` has them, in the folder of a run
EXPORT = "export"  # ``strategy`` in the manifest of exported weights, which no run goes on from

_STEP = re.compile(r"step-0*([0-9]{1,18})")
LEFTOVER = re.compile(r"(?P<name>.+)\.(?P<kind>partial|removing|replaced)-[0-9a-f]{16}")
_BROKEN = re.compile(r"broken-.+-[0-9]+")


def step_of(name: str) -> int | None:
    """``"step-100"`` and ``"step-00000100"`` → 100; ``None`` for other names."""
    matched = _STEP.fullmatch(name)
    return int(matched[1]) if matched else None


def is_broken(name: str) -> bool:
    """Is it the name that ``mark_broken`` gives?"""
    return _BROKEN.fullmatch(name) is not None


def is_leftover(name: str) -> bool:
    """Is it the name of a folder that is no checkpoint yet, or no longer?"""
    return LEFTOVER.fullmatch(name) is not None


def is_reserved(name: str) -> bool:
    """Can no checkpoint have this name?"""
    return name.startswith(".") or name == LATEST or is_broken(name) or is_leftover(name)


def is_ours(folder: Path) -> bool:
    """Did shardwise write the folder? Other programs call files manifest.json, too."""
    return bool(writer_of(folder))


def writer_of(folder: Path) -> str:
    """``strategy`` in the manifest; ``"unknown"`` where it is damaged, ``""`` if it is not ours."""
    path = folder / MANIFEST
    if not (path.is_file() or (folder / TRAINING).is_file()):
        return ""
    try:
        fields = json.loads(path.read_bytes() if path.stat().st_size <= CAP else b"")
    except (FileNotFoundError, ValueError, RecursionError):  # damaged, or lost
        known = step_of(folder.name) is not None or any(folder.glob("*.safetensors"))
        return "unknown" * known
    if isinstance(fields, dict) and fields.get("format") == "shardwise" and "digest" in fields:
        return str(fields.get("strategy") or "unknown")
    return "unknown" * (step_of(folder.name) is not None)


def files_in(folder: Path) -> dict[str, Path]:
    """The files of a checkpoint's folder by name, those of its ``training`` with that before it."""
    paths = (*folder.iterdir(), *(folder / INNER).glob("*"))
    return {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}


def strangers(folder: Path, listed: Collection[str]) -> list[str]:
    """Names in the folder, of files and folders, that no save wrote: all but what is ``listed``."""
    known = {*listed, MANIFEST, LOCK}
    known |= {INNER} & {name.partition("/")[0] for name in listed}
    paths = [*folder.iterdir(), *((folder / INNER).glob("*") if INNER in known else ())]
    return sorted({path.relative_to(folder).as_posix() for path in paths} - known)
