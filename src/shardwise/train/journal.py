"""`metrics.jsonl`: one JSON object per record, written as it happens, through every restart.

A run that was killed has recorded steps that the run which goes on will take again. So the
file is cut where that one begins, in one step, before anything is added to it; what is said
before it is known where that is waits.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from shardwise.train.folder import Folder, named
from shardwise.train.metrics import Evaluated, Record, Stepped

__all__ = ["Journal", "kept"]

DRAWN = {"stepped": Stepped, "evaluated": Evaluated}


class Journal:
    """The file, and the records of steps and validations in it, from the run's first step on.

    A line is whole or absent, so the file of a run that was killed can be read. What is not
    finite is ``null``, since JSON has no infinity.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = []
        self._begun = False

    def begin(self, after: int) -> None:
        """Keep what was recorded up to step ``after``, and add from here on."""
        with named(self.path):
            lines = self.path.read_text("utf-8", "replace") if self.path.exists() else ""
        before = list(kept(lines.splitlines(), after))
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in before)
        waiting, self._begun = self.records, True
        self.records = [record for line in before if (record := _drawn(line)) is not None]
        Folder(self.path.parent).write_text(self.path.name, text)
        for record in waiting:
            self(record)

    def __call__(self, record: Record) -> None:
        self.records.append(record)
        if not self._begun:
            return
        line = {"record": type(record).__name__.lower(), **asdict(record)}
        if isinstance(record, Evaluated):
            line["perplexity"] = record.perplexity
        with named(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(line), ensure_ascii=False) + "\n")

    def sync(self) -> None:
        """Return when what was recorded is on the disk: a checkpoint must not be ahead of it."""
        with named(self.path), self.path.open("a") as file:
            os.fsync(file.fileno())


def kept(lines: Iterable[str], after: int) -> Iterator[dict[str, Any]]:
    """The lines before the first that is torn or speaks of a step later than ``after``. Pure.

    Of a run that begins anew, ``after`` 0, there are none.
    """
    for line in lines if after else ():
        try:
            found = json.loads(line)
        except ValueError:
            return
        if not isinstance(found, dict) or found.get("step", 0) > after:
            return
        yield found


def _drawn(line: Mapping[str, Any]) -> Record | None:
    """A line as the record that it was, if it is one that the picture shows."""
    kind = DRAWN.get(str(line.get("record")))
    if kind is None:
        return None
    values = {field.name: line.get(field.name) for field in fields(kind)}
    record: Record = kind(
        **{name: math.nan if value is None else value for name, value in values.items()}
    )
    return record


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
