"""How a run begins: afresh, where it stopped, or not at all since it is finished.

Decided from the recipe and from what is in its folder, before anything is written, so that the
launcher can ask before it starts a process, and rank 0 again. Nothing needs to be done by hand
after a crash: whatever it left in the folder, the same command goes on.

    the folder holds                      checkpoint.resume auto      run.overwrite true
    ------------------------------------  --------------------------  ------------------
    nothing                               afresh                      afresh
    a run that was stopped or killed      goes on                     goes on
    a finished run                        finished; more run.steps:   afresh
                                          goes on
    a run with another meaning            refused, naming the keys    afresh
    something else                        refused                     refused

So an interrupted run goes on by the same command also where that says overwrite. Whatever is
there, ``run.overwrite true`` with ``checkpoint.resume never`` begins afresh.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from shardwise.checkpoint.folder import steps
from shardwise.errors import ConfigError
from shardwise.train.config import Recipe
from shardwise.train.folder import CHECKPOINTS, JOURNAL, RECIPE, kept
from shardwise.train.metrics import count
from shardwise.train.recipe import flat, keys

__all__ = [
    "FIRST",
    "FIXED",
    "OVERWRITE",
    "Attempt",
    "Start",
    "check_ours",
    "check_same",
    "decide",
    "differences",
    "finished_steps",
]

FIXED = (
    "model",
    "tokenizer",
    "data.field",
    "data.max_bytes",
    "data.validation",
    "data.context",
    "batch.rows",
    "optimizer",
    "sharding.precision.stored",
    "run.seed",
)
"""Keys and sections that make a run what it is. data.source is not one of them, since text may
move; that it is the same text, a fingerprint says."""

OVERWRITE = (
    "name another folder with --run.folder, or start over with --run.overwrite true, which deletes "
    "that run."
)


class Start(enum.Enum):
    """How a run begins."""

    AFRESH = "afresh"
    GO_ON = "go on"
    FINISHED = "finished"


class Attempt(NamedTuple):
    """Which time a launcher starts the ranks of one run.

    Attributes:
        number: 0 for the first time.
        launch: the launcher's name, the same each time; ``""`` without one.
    """

    number: int = 0
    launch: str = ""


FIRST = Attempt()


def decide(recipe: Recipe, restarted: bool = False) -> Start:
    """How a run of ``recipe`` begins; writes nothing.

    Args:
        restarted: the run in the folder is this one, whose ranks are started again.

    Raises:
        ConfigError: its folder holds something else, or a run that it cannot go on with.
    """
    if not check_ours(recipe):
        return Start.AFRESH
    path = Path(recipe.run.folder).expanduser()
    _check_forward(recipe, path)
    if recipe.run.overwrite and not restarted:
        return Start.GO_ON if _is_interrupted(recipe, path) else Start.AFRESH
    if recipe.checkpoint.resume == "never" and not restarted:
        raise ConfigError(
            f"run.folder {path} holds an earlier run, and checkpoint.resume is never; {OVERWRITE}"
        )
    check_same(_read(kept(path, RECIPE)), recipe, f"run.folder {path} holds an earlier run")
    done = finished_steps(path)
    if done is not None and done >= recipe.run.steps:
        return Start.FINISHED
    saved = path / CHECKPOINTS
    if done is not None and not (saved.is_dir() and steps(saved)):
        raise ConfigError(
            f"run.folder {path} holds a run that is finished with {count(done, 'step')} and has no "
            f"checkpoint, so it cannot go on to {recipe.run.steps}; {OVERWRITE}"
        )
    return Start.GO_ON


def check_ours(recipe: Recipe) -> bool:
    """Is there a run in the folder? ``ConfigError`` if something else is."""
    path = Path(recipe.run.folder).expanduser()
    entries = _entries(path)
    if entries and RECIPE not in entries:
        raise ConfigError(
            f"run.folder {path} holds {', '.join(entries[:3])}{', …' * (len(entries) > 3)} and no "
            f"{RECIPE}, so it is not an earlier run and is left alone; name another folder."
        )
    return bool(entries)


def _is_interrupted(recipe: Recipe, path: Path) -> bool:
    """Is the run in ``path`` this one, not finished, and may it go on?"""
    if recipe.checkpoint.resume == "never" or finished_steps(path) is not None:
        return False
    try:
        return not differences(_read(kept(path, RECIPE)), recipe)
    except ConfigError:  # nothing says what run it is
        return False


def _check_forward(recipe: Recipe, path: Path) -> None:
    """A run goes on from its newest checkpoint; what it did since then would be lost."""
    source = recipe.checkpoint.resume
    if source != "auto" and Path(source).expanduser().resolve().is_relative_to(path.resolve()):
        raise ConfigError(
            f"checkpoint.resume {source} lies in run.folder {path}, and a run goes on from its "
            "newest checkpoint. Leave checkpoint.resume out; or, to go back to an earlier one, "
            "name another folder with --run.folder."
        )


def _entries(path: Path) -> list[str]:
    if path.exists() and not path.is_dir():
        raise ConfigError(f"run.folder {path} is a file; name a folder.")
    # Hidden files do not count: a run that was killed while writing may have left one.
    names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    return sorted(name for name in names if not name.startswith("."))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path} cannot be read as a recipe, so nothing says what run this is; {OVERWRITE}"
        )
    return found


def finished_steps(path: Path) -> int | None:
    """The steps of the run in ``path`` if its last record says that it came to its end."""
    try:
        last = kept(path, JOURNAL).read_bytes().rsplit(b"\n", 2)[-2]
        record = json.loads(last)
        return int(record["steps"]) if record["record"] == "finished" else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


# --- the same run? ---------------------------------------------------------------------------


def differences(before: Mapping[str, Any], now: Recipe) -> list[str]:
    """Keys that make it another run, with both values. Pure.

    Args:
        before: the tree of an earlier run's recipe. A key that it lacks, as one that an earlier
            version did not know, had its default.
    """
    old, new = flat(before), flat(now.model_dump(mode="json"))
    defaults = {key.name: _plain(key.default) for key in keys()}
    return [
        f"{name} was {old.get(name, defaults.get(name))!r} and is {value!r}"
        for name, value in new.items()
        if any(name == fixed or name.startswith(f"{fixed}.") for fixed in FIXED)
        and old.get(name, defaults.get(name)) != value
    ]


def check_same(before: Mapping[str, Any], now: Recipe, what: str) -> None:
    """Raises ``ConfigError`` if ``now`` means another run than ``before``; ``what`` begins it."""
    if found := differences(before, now):
        raise ConfigError(
            f"{what} that this recipe cannot go on with: {'; '.join(found)}. Set "
            f"{'it' if len(found) == 1 else 'them'} as before; or {OVERWRITE}"
        )


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
