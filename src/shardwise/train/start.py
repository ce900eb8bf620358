"""The start of a run: new, resumed, or not at all because it is finished.

Decided from the recipe and the content of its folder, before anything is written. The launcher
decides before it starts a process, and rank 0 decides again. After a crash the same command
resumes, whatever the crash left in the folder.

    the folder holds                      checkpoint.resume auto      run.overwrite true
    ------------------------------------  --------------------------  ------------------
    nothing                               new                         new
    a run that was stopped or killed      resumed                     resumed
    a finished run                        finished; resumed if        new
                                          run.steps was raised
    a run with other identity keys        refused, naming the keys    new
    something else                        refused                     refused

So the same command resumes an interrupted run even with ``run.overwrite true``. Together with
``checkpoint.resume never`` it always starts a new run.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from shardwise.checkpoint.folder import checkpoints
from shardwise.errors import ConfigError
from shardwise.recipe.read import flatten
from shardwise.recipe.recipe import Recipe, keys
from shardwise.train.folder import CHECKPOINTS, METRICS, RECIPE
from shardwise.train.metrics_log import lines_until, typed
from shardwise.train.records import plural

IDENTITY_KEYS = (
    "model",
    "adapter",
    "tokenizer.vocabulary",
    "tokenizer.end",
    "data.format",
    "data.field",
    "data.packing",
    "data.loss_on",
    "data.max_bytes",
    "data.validation",
    "data.context",
    "data.streaming.streams",
    "data.streaming.shuffle",
    "batch.rows",
    "optimizer",
    "sharding.precision.stored_dtype",
    "run.seed",
)
"""Keys and sections that identify a run. data.source and tokenizer.source are not among them: files
may be moved, and a fingerprint of the tokens tells whether they are the same."""

OVERWRITE_HINT = (
    "name another folder with --run.folder, or start over with --run.overwrite true, which deletes "
    "that run."
)


class Start(enum.Enum):
    """The start of a run."""

    NEW = "new"
    RESUME = "resume"
    FINISHED = "finished"


class Attempt(NamedTuple):
    """The attempt of a launcher to run the ranks of one run.

    Attributes:
        number: 0 for the first attempt.
        launch_id: the launcher's run id, the same for each attempt; ``""`` without a launcher.
    """

    number: int = 0
    launch_id: str = ""


FIRST_ATTEMPT = Attempt()


def decide_start(recipe: Recipe, restarted: bool = False) -> Start:
    """Decide how a run of ``recipe`` starts; writes nothing.

    ``Folder.locked`` comes first: a crash may have left an earlier run partly moved.

    Args:
        restarted: the launcher has restarted the ranks of this run.

    Raises:
        ConfigError: its folder holds something else, or a run that it cannot resume.
    """
    if not holds_run(recipe):
        return Start.NEW
    path = Path(recipe.run.folder).expanduser()
    _check_resume_source(recipe, path)
    if recipe.run.overwrite and not restarted:
        return Start.RESUME if _is_interrupted(recipe, path) else Start.NEW
    if recipe.checkpoint.resume == "never" and not restarted:
        raise ConfigError(
            f"run.folder {path} holds an earlier run, and checkpoint.resume is never; "
            f"{OVERWRITE_HINT}"
        )
    earlier = _read(path / RECIPE)
    check_same_run(earlier, recipe, f"run.folder {path} holds an earlier run")
    finished = finished_steps(path)
    if finished is not None and _is_long_enough(path, finished, earlier, recipe):
        return Start.FINISHED
    if finished is not None and not checkpoints(path / CHECKPOINTS):
        epochs, steps = recipe.run.epochs, recipe.run.steps
        raise ConfigError(
            f"run.folder {path} holds a run that finished with {plural(finished, 'step')} and has "
            "no checkpoint, so it cannot continue to "
            f"{steps if epochs is None else f'{epochs:g} epochs'}; {OVERWRITE_HINT}"
        )
    return Start.RESUME


def _is_long_enough(path: Path, finished: int, earlier: Mapping[str, Any], recipe: Recipe) -> bool:
    """Has the finished run all steps or epochs? How many steps an epoch has is not known yet.

    The same recipe asks for no more, also where ``run.patience`` or the text ended it.
    """
    if flatten(earlier) == flatten(recipe.model_dump(mode="json")):
        return True
    if recipe.run.epochs is None:
        return finished >= recipe.run.steps
    epochs = flatten(earlier).get("run.epochs")
    planned = _planned_steps(path) or finished  # in the epochs of before
    return epochs is not None and epochs * finished >= recipe.run.epochs * planned


def holds_run(recipe: Recipe) -> bool:
    """Is there a run in the folder? Raises ``ConfigError`` if it holds something else.

    Checkpoints alone are what an attempt that ended early has fetched from the mirror.
    """
    path, config = Path(recipe.run.folder).expanduser(), recipe.checkpoint
    entries = _entries(path)
    if entries == [CHECKPOINTS] and config.mirror is not None and config.resume == "auto":
        return False
    if entries and RECIPE not in entries:
        raise ConfigError(
            f"run.folder {path} holds {', '.join(entries[:3])}{', …' * (len(entries) > 3)} and no "
            f"{RECIPE}, so it is not an earlier run and is not changed; name another folder."
        )
    return bool(entries)


def _is_interrupted(recipe: Recipe, path: Path) -> bool:
    """Is the run in ``path`` this one, not finished, and may it be resumed?"""
    if recipe.checkpoint.resume == "never" or finished_steps(path) is not None:
        return False
    try:
        return not differences(_read(path / RECIPE), recipe)
    except ConfigError:  # its recipe cannot be read
        return False


def _check_resume_source(recipe: Recipe, path: Path) -> None:
    """Refuse an older checkpoint of the same run: its later steps would be lost."""
    source = recipe.checkpoint.resume
    if source != "auto" and Path(source).expanduser().resolve().is_relative_to(path.resolve()):
        raise ConfigError(
            f"checkpoint.resume {source} lies in run.folder {path}, and a run is resumed from its "
            "newest checkpoint. Leave checkpoint.resume out; or, to go back to an earlier one, "
            "name another folder with --run.folder."
        )


def _entries(path: Path) -> list[str]:
    if path.exists() and not path.is_dir():
        raise ConfigError(f"run.folder {path} is a file; name a folder.")
    # Hidden files are ignored: a run that was killed while writing may have left one.
    names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    return sorted(name for name in names if not name.startswith("."))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        recipe = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        recipe = None
    if not isinstance(recipe, dict):
        raise ConfigError(
            f"{path} cannot be read as a recipe, so the run is unknown; {OVERWRITE_HINT}"
        )
    return recipe


def finished_steps(path: Path) -> int | None:
    """The steps of the run in ``path`` if its last record says that it finished."""
    try:
        last = (path / METRICS).read_bytes().rsplit(b"\n", 2)[-2]
        record = json.loads(last)
        return int(record["steps"]) if record["record"] == "finished" else None
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError):
        return None


def _planned_steps(path: Path) -> int | None:
    """The steps that the last attempt of the finished run in ``path`` was to reach."""
    text = (path / METRICS).read_text("utf-8", "replace")
    lines = map(typed, lines_until(text.split("\n"), math.inf))
    built = [line.get("steps") for line in lines if line and line.get("record") == "built"]
    return built[-1] if built else None


# --- the same run? ---------------------------------------------------------------------------


def differences(earlier: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """Identity keys whose values differ, with both values. Pure.

    Args:
        earlier: the recipe of an earlier run as nested mappings. A missing key, which its version
            did not know, counts as its default.
    """
    old, values = flatten(earlier), flatten(recipe.model_dump(mode="json"))
    if (stored := "sharding.precision.stored") in old:  # the name of this key in 0.1
        old[f"{stored}_dtype"] = old[stored]
    defaults = {
        key.name: list(key.default) if isinstance(key.default, tuple) else key.default
        for key in keys()
    }
    return [
        f"{name} was {old.get(name, defaults.get(name))!r} and is {value!r}"
        for name, value in values.items()
        if any(name == key or name.startswith(f"{key}.") for key in IDENTITY_KEYS)
        and old.get(name, defaults.get(name)) != value
    ]


def check_same_run(earlier: Mapping[str, Any], recipe: Recipe, subject: str) -> None:
    """Raises ``ConfigError`` if ``recipe`` defines another run than ``earlier``.

    Args:
        subject: the beginning of the message.
    """
    if differing := differences(earlier, recipe):
        own_mirror = "name another checkpoint.mirror, and " * (recipe.checkpoint.mirror is not None)
        raise ConfigError(
            f"{subject} that this recipe cannot resume: {'; '.join(differing)}. Set "
            f"{'it' if len(differing) == 1 else 'them'} as before; or {own_mirror}{OVERWRITE_HINT}"
        )
