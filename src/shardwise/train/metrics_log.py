"""`metrics.jsonl`: one JSON object per record, appended as it is emitted, over all restarts.

A killed run has recorded steps that the resumed run repeats. So the file is cut at the step that
the run resumes from, atomically, before anything is appended. Records that are logged before that
step is known are queued.

Beside its record each line has ``time``, seconds since 1970, and ``elapsed``, seconds that all
attempts of the run have taken so far.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, create_model

from shardwise.train.folder import Folder, errors_naming
from shardwise.train.records import Evaluated, Record, Stepped

PLOTTED = {"stepped": Stepped, "evaluated": Evaluated}
NOT_FINITE = ("loss", "grad_norm", "accuracy", "unigram_entropy")  # numbers that may be null


def _whole(value: object) -> object:
    """Text as UTF-8 has it: names of files may hold half a surrogate pair."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(_whole)]


class MetricsLog:
    """The file, and its records of steps and validations since the run's first step.

    A line is complete or absent, so the file of a killed run can be read. It is ASCII, since some
    characters end a line for some readers, and names of files may hold what UTF-8 has no bytes for.
    Numbers that are not finite are ``null``, since JSON has no infinity.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = []
        self._started = False
        self._began = time.perf_counter()  # less the seconds of earlier attempts

    @property
    def elapsed(self) -> float:
        """Seconds of the run so far, with those of its earlier attempts."""
        return time.perf_counter() - self._began

    def start(self, step: int) -> None:
        """Keep the records up to step ``step``, and append from now on."""
        with errors_naming(self.path):
            lines = self.path.read_text("utf-8", "replace") if self.path.exists() else ""
        kept_lines = list(lines_until(lines.split("\n"), step))
        if kept_lines:  # steps that will be taken again have cost their time, too
            *_, last = lines_until(lines.split("\n"), math.inf)
            self._began -= (typed(last) or {}).get("elapsed", 0.0)
        text = "".join(json.dumps(line) + "\n" for line in kept_lines)
        queued, self._started = self.records, True
        self.records = [
            record
            for line in map(typed, kept_lines)
            if line is not None and (record := _plotted_record(line)) is not None
        ]
        Folder(self.path.parent).write_text(self.path.name, text)
        for record in queued:
            self(record)

    def __call__(self, record: Record) -> None:
        self.records.append(record)
        if not self._started:
            return
        line = {"record": type(record).__name__.lower(), **asdict(record)}
        line |= {"time": round(time.time(), 3), "elapsed": round(self.elapsed, 3)}
        if isinstance(record, Evaluated):
            line["perplexity"] = record.perplexity
        with errors_naming(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(line)) + "\n")

    def sync(self) -> None:
        """Flush the file to the disk: a checkpoint must not be ahead of it."""
        with errors_naming(self.path), self.path.open("a") as file:
            os.fsync(file.fileno())


def lines_until(lines: Iterable[str], step: float) -> Iterator[dict[str, Any]]:
    """The lines before the first that is cut off or of a step later than ``step``. Pure.

    Of a run that begins anew, ``step`` 0, there are none.
    """
    for line in lines if step else ():
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError):
            return
        at = parsed.get("step", 0) if isinstance(parsed, dict) else None
        if not isinstance(at, int) or at > step:
            return
        yield parsed


def typed(line: Mapping[str, Any]) -> dict[str, Any] | None:
    """``line`` with values of the types that its record has; ``None`` if they are others."""
    name = line.get("record")
    try:
        form = _form(name if isinstance(name, str) else "").model_validate(line)
        return {**line, **form.model_dump(exclude_unset=True)}
    except ValidationError:
        return None


@cache
def _form(name: str) -> type[BaseModel]:
    """The values of a record's line, each of which may be missing."""
    hints: dict[str, Any] = {"record": str, "time": float, "elapsed": float}
    for kind in get_args(Record):
        if kind.__name__.lower() == name:
            hints |= get_type_hints(kind)
    hints = {key: Text if hint is str else hint for key, hint in hints.items()}
    fields: Any = {
        key: (hint | None if key in NOT_FINITE else hint, None) for key, hint in hints.items()
    }
    return create_model("Line", __config__=ConfigDict(allow_inf_nan=False), **fields)


def _plotted_record(line: Mapping[str, Any]) -> Record | None:
    """The record of a line, if it is plotted."""
    kind = PLOTTED.get(str(line.get("record")))
    if kind is None:
        return None
    values = {field.name: line.get(field.name) for field in fields(kind)}
    may_be_none = {field.name for field in fields(kind) if field.default is None}
    not_finite = {n: math.nan for n, v in values.items() if v is None and n not in may_be_none}
    record: Record = kind(**values | not_finite)
    return record


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
