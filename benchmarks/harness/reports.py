"""Reports as JSON files. A report is a frozen dataclass, and its fields are the file's schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

Report = TypeVar("Report")


def write(report: Any, path: Path) -> None:
    """Write a report, a dataclass, as JSON."""
    path.write_bytes(TypeAdapter(type(report)).dump_json(report, indent=1) + b"\n")


def read(kind: type[Report], path: Path) -> Report:
    """Read a report of this ``kind``.

    Raises:
        ValueError: a field is missing, unknown, or of another type.
    """
    text, adapter = path.read_bytes(), TypeAdapter(kind)
    report = adapter.validate_json(text, strict=True)
    if adapter.dump_python(report, mode="json") != json.loads(text):
        raise ValueError(f"{path} has fields that {kind.__module__}.{kind.__name__} has not")
    return report
