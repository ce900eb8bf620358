"""Rows of JSON, beside those of other files in `test_sources`."""

from __future__ import annotations

import json
from pathlib import Path

from shardwise.train.json_rows import read_json


def test_values_of_json_keep_their_type(tmp_path: Path) -> None:
    """A number makes no text of the others, nor quotes around them."""
    rows = [{"m": [{"content": "q"}, {"content": content}]} for content in ("a", 4, None)]
    text = "\n".join(map(json.dumps, [*rows, {"m": "2020-01-14"}]))
    path = tmp_path / "a.jsonl"
    path.write_text(f"\ufeff\n{text}\n\n", "utf-8")
    assert list(read_json([str(path)])) == [*rows, {"m": "2020-01-14"}]
    half = tmp_path / "b.jsonl"
    half.write_text('{"a": "\\ud83d \\ud83d\\ude00"}')
    assert list(read_json([str(half)])) == [{"a": "? 😀"}]
