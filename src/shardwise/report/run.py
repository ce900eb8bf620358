"""A run as its folder holds it. What is not there is ``None`` or empty, and a report says so."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from shardwise.errors import ConfigError
from shardwise.plan.printed import size
from shardwise.recipe.read import flatten
from shardwise.train.folder import METRICS, RECIPE, STEP
from shardwise.train.metrics_log import lines_until, typed

Line = Mapping[str, Any]
NEEDED = {  # keys of a line, by its record
    "built": ("strategy", "ranks", "parameters"),
    "stepped": ("step", "steps", "loss", "tokens_per_second", "seconds_left", "memory"),
    "evaluated": ("step", "loss"),
    "saved": ("step", "nbytes"),
    "resumed": ("step",),
    "sampled": ("prompt", "text"),
    "warned": ("message",),
}


class Step(BaseModel, allow_inf_nan=False):
    """The content of step.json: see ``train/recorded_step.py``."""

    step: int
    kinds: list[str]
    moments: list[tuple[float, list[int], tuple[str, str, str, str] | None]]
    planned: list[tuple[int | None, int | None]] = []
    planned_most: dict[str, int] | None = None


@dataclass(frozen=True)
class Run:
    """Content of a run's folder.

    Attributes:
        name: of the folder.
        lines: of metrics.jsonl, in order.
        recipe: each key with its value.
        step: of step.json.
    """

    name: str
    lines: tuple[Line, ...]
    recipe: Mapping[str, Any]
    step: Mapping[str, Any] | None

    def of(self, kind: str) -> list[Line]:
        """Return the lines of one kind of record, such as ``"stepped"``."""
        return [line for line in self.lines if line["record"] == kind]

    def last(self, kind: str) -> Line:
        """Return the last line of that kind; an empty one if there is none."""
        return next((line for line in reversed(self.lines) if line["record"] == kind), {})

    @property
    def why_early(self) -> str:
        """The warning by which a run has ended before its last step; ``""``: none has."""
        step = self.last("stepped")
        ends = f"step {step.get('step')} of {step.get('steps')}"
        whys = (line["message"] for line in self.of("warned") if ends in line["message"])
        return next(whys, "").rstrip(".")


def read_run(path: Path) -> Run:
    """Read the files of the run in ``path``.

    Raises:
        ConfigError: there is no run, or nothing of it is recorded.
    """
    try:
        text = (path / METRICS).read_text("utf-8", "replace")
    except OSError as error:
        raise ConfigError(
            f"{path} is not the folder of a run: {METRICS} cannot be read ({error.strerror}). "
            "Name the folder that the run's recipe calls run.folder."
        ) from None
    read = map(typed, lines_until(text.split("\n"), math.inf))
    lines = tuple(line for line in read if line is not None and _has_all(line))
    if not lines:
        raise ConfigError(
            f"{path / METRICS} has no record that can be read ({size(len(text))}): the run has not "
            "begun its first step, or the file was not written by shardwise train."
        )
    recipe, step = _parsed(path / RECIPE), _step(_parsed(path / STEP))
    return Run(path.resolve().name, lines, flatten(recipe or {}), step)


def _step(parsed: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The step if it can be drawn. Another version's may not, or a damaged one."""
    try:
        read = Step.model_validate(parsed)
    except ValidationError:
        return None
    is_whole = read.planned_most is None or read.planned_most.keys() == {*read.kinds}
    is_whole &= all(len(nbytes) == len(read.kinds) for _, nbytes, _ in read.moments)
    return read.model_dump(exclude_unset=True) if is_whole else None


def _has_all(line: Line) -> bool:
    """Has the line what it is drawn by? Another version's may not, or a damaged one."""
    return {"record", "time", *NEEDED.get(str(line.get("record")), ())} <= line.keys()


def _parsed(path: Path) -> dict[str, Any] | None:
    """The mapping in a file, or ``None`` if there is none that can be read."""
    try:
        text = path.read_text("utf-8")
        parsed = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return parsed if isinstance(parsed, dict) else None
