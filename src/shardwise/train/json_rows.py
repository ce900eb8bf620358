"""Rows in files of JSON: one in a line, or all in an array.

They are read by Python's own parser. That of `datasets` guesses a type for each column of a file: a
column of dates becomes times, and text in a column with numbers gets quotes.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from io import BufferedIOBase
from typing import Any

from shardwise.train.formats import BOM


def read_json(files: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of ``files``, compressed if they end in ``.gz``.

    Raises:
        ValueError: a row is not a JSON object; with its file and line.
        OSError: a file cannot be read.
    """
    for name in files:
        with (gzip.open if name.endswith(".gz") else open)(name, "rb") as file:
            for number, row in _rows(file, name):
                if not isinstance(row, dict):
                    kind = type(row).__name__
                    raise ValueError(f"{name}:{number}: a row is {kind}, not a JSON object.")
                yield row


def _rows(file: BufferedIOBase, name: str) -> Iterator[tuple[int, Any]]:
    """Each row with the number of its line; of an array with its own."""
    is_first = True
    for number, line in enumerate(file, start=1):
        text = line.removeprefix(BOM).strip()
        if is_first and text.startswith(b"["):
            yield from enumerate(_parsed(text + file.read(), f"{name}:{number}"), start=1)
        elif text:
            yield number, _parsed(text, f"{name}:{number}")
        is_first = is_first and not text


def _parsed(text: bytes, where: str) -> Any:
    """``text`` with ? for half a surrogate pair, which JSON may escape and no tokenizer takes."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {error}.") from None
    if not re.search(rb"\\u[dD]", text):
        return parsed
    return json.loads(json.dumps(parsed, ensure_ascii=False).encode("utf-8", "replace"))
