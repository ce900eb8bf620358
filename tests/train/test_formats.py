from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Callable
from itertools import islice
from math import inf
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from shardwise.errors import ConfigError
from shardwise.train import formats
from shardwise.train.formats import Skipped, documents

ROW = b'{"text": "row"}\n'


def read(file: Path, column: str = "text", max_bytes: float = inf) -> list[str]:
    return [row for row in documents(file, column, max_bytes) if isinstance(row, str)]


def left_out(file: Path, column: str = "text") -> list[tuple[str, str, int]]:
    """What cannot be used of ``file``: reason, place in the file, rows."""
    return [
        (row.reason, row.where.removeprefix(str(file)), row.rows)
        for row in documents(file, column, inf)
        if isinstance(row, Skipped)
    ]


def file_of(tmp_path: Path, name: str, data: bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


# --- what there is to read -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.jsonl.gz", "a.json.gz"])
def test_a_line_of_json_is_a_document(tmp_path: Path, name: str) -> None:
    data = b'{"body": "one"}\n\n{"body": "two", "n": 2}\n'
    assert read(file_of(tmp_path, name, data), "body") == ["one", "two"]


def test_half_a_surrogate_pair_is_a_question_mark(tmp_path: Path) -> None:
    path = file_of(
        tmp_path, "a.jsonl", b'{"text": "one \\ud800 two"}\n{"text": "\\ud83e\\udd99"}\n'
    )
    assert read(path) == ["one ? two", "\U0001f999"]


@pytest.mark.parametrize("name", ["a.txt", "a.py", "a", "a.txt.gz", "config.json"])
def test_other_text_is_one_document(tmp_path: Path, name: str) -> None:
    data = b'{\n  "text": "one"\n}\n'
    assert read(file_of(tmp_path, name, data)) == [data.decode()]


def test_a_parquet_row_is_a_document(tmp_path: Path) -> None:
    table = pa.table({"body": ["one", None, "two"], "n": [1, 2, 3]})
    for number, column in enumerate((table["body"], table["body"].dictionary_encode())):
        path = tmp_path / f"{number}.parquet"
        parquet.write_table(table.set_column(0, "body", column), path, row_group_size=2)
        assert read(path, "body") == ["one", "two"]
        assert left_out(path, "body") == [("'body' is null", ":2", 1)]


@pytest.mark.parametrize(
    ("name", "data"), [("a.txt", b"text\r\n"), ("a.jsonl", b'{"text": "text\\n"}')]
)
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str, data: bytes) -> None:
    assert read(file_of(tmp_path, name, b"\xef\xbb\xbf" + data)) == ["text\n"]


def test_text_is_the_same_however_it_is_cut_into_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a line\n漢字 and 🦙 in one line\n\nthe end: é"
    path = file_of(tmp_path, "a.txt", text.encode())
    for size in range(1, 30):
        monkeypatch.setattr(formats, "BLOCK", size)
        assert read(path) == [text]


# --- what cannot be used ---------------------------------------------------------------------

BAD = {
    "not JSON": b"{oops\n",
    "not UTF-8": b'{"text": "\xff"}\n',
    "not a JSON object": b"[1]\n",
    "'text' is null": b'{"text": null}\n',
    "'text' is int, not text": b'{"text": 3}\n',
    "no field 'text'": b"{}\n",
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_row_is_named_and_the_rest_is_read(tmp_path: Path, reason: str) -> None:
    path = file_of(tmp_path, "a.jsonl", 2 * ROW + BAD[reason] + 3 * ROW)
    assert read(path) == ["row"] * 5
    assert left_out(path) == [(reason, ":3", 1)]


def test_a_nest_without_end_is_not_json(tmp_path: Path) -> None:
    assert left_out(file_of(tmp_path, "a.jsonl", b"[" * 100_000)) == [("not JSON", ":1", 1)]


def test_a_row_that_is_too_long_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "MAX_ROW", 20)
    path = file_of(tmp_path, "a.jsonl", ROW + b"x" * 99 + b"\n" + ROW)
    assert read(path) == ["row", "row"]
    assert left_out(path) == [("longer than 20 bytes", ":2", 1)]


def test_a_line_that_is_not_utf_8_is_left_out_of_a_text(tmp_path: Path) -> None:
    path = file_of(tmp_path, "a.txt", b"one\ntw\xff\nthree\n")
    assert read(path) == ["one\nthree\n"]
    assert left_out(path) == [("not UTF-8", ":2", 1)]


def test_a_file_with_a_zero_byte_at_its_beginning_is_not_text(tmp_path: Path) -> None:
    for name in ("a.bin", "a.txt", "a.jsonl", "a.txt.gz"):
        path = file_of(tmp_path, name, b"GIF89a\x00\x01")
        assert left_out(path) == [("not text", "", 0)]
        assert read(path) == []


def test_of_a_broken_archive_the_beginning_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(1000 * ROW)[:-8])
    assert read(path) == ["row"] * 1000
    assert left_out(path) == [("broken archive, the rest of it", "", 0)]


def test_a_damaged_group_of_parquet_rows_costs_that_group(tmp_path: Path) -> None:
    path, table = tmp_path / "a.parquet", pa.table({"text": [f"row {i}" * 9 for i in range(30)]})
    parquet.write_table(table, path, row_group_size=10, compression="gzip", use_dictionary=False)
    column = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    end = column.data_page_offset + column.total_compressed_size
    data[end - 30 : end - 10] = bytes(20)
    path.write_bytes(data)
    assert read(path) == [f"row {i}" * 9 for i in range(30) if i // 10 != 1]
    assert left_out(path) == [("damaged", ":11", 10)]


def test_what_only_claims_to_be_parquet_is_left_out(tmp_path: Path) -> None:
    assert left_out(file_of(tmp_path, "a.parquet", b"no")) == [("not parquet", "", 0)]


def test_an_array_of_rows_says_how_to_make_it_lines(tmp_path: Path) -> None:
    ((reason, _, rows),) = left_out(file_of(tmp_path, "a.json", b'[\n {"text": "one"}]'))
    assert (reason, rows) == ("a JSON array; jq -c '.[]' makes a row per line", 0)


# --- a wrong field ---------------------------------------------------------------------------


def message(file: Path, column: str = "text") -> str:
    with pytest.raises(ConfigError) as caught:
        list(documents(file, column, inf))
    return str(caught.value)


def test_a_field_that_no_row_has_is_an_error_with_the_nearest(tmp_path: Path) -> None:
    path = file_of(tmp_path, "a.jsonl", b'{"id": 1, "txet": "a"}\n')
    assert message(path) == (
        f"{path}:1: no field 'text'. Fields there: id (int), txet (text). Choose one that holds "
        "text, such as --data.field txet."
    )


def test_a_field_that_holds_no_text_is_not_proposed(tmp_path: Path) -> None:
    path = file_of(tmp_path, "chat.jsonl", b'{"messages": [{"role": "user", "content": "hi"}]}\n')
    for column, fact in (("text", "no field 'text'"), ("messages", "'messages' is list, not text")):
        assert message(path, column) == (
            f"{path}:1: {fact}. Fields there: messages (list). No field is text; write the text "
            "to train on into one field."
        )


def test_a_wrong_field_is_found_without_reading_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "MAX_TRIED_ROWS", 3)
    path = file_of(tmp_path, "a.jsonl", b'{"body": "a"}\n' * 3 + ROW)
    assert message(path).startswith(f"{path}:1: no field 'text'.")


def test_a_missing_parquet_column_names_the_columns(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"id": [1], "body": ["a"]}), tmp_path / "a.parquet")
    assert "no field 'text'. Fields there: id (int64), body (text)." in message(
        tmp_path / "a.parquet"
    )


# --- memory ----------------------------------------------------------------------------------

BIG = 1 << 24  # bytes


def text(path: Path) -> None:
    path.write_bytes(b"a line of text\n" * (BIG // 15))


def one_line(path: Path) -> None:
    path.write_bytes(b"words " * (BIG // 6))


def zeros(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 33)


def rows(path: Path) -> None:
    path.write_bytes((json.dumps({"text": "a row of text " * 99}) + "\n").encode() * (BIG // 1400))


@pytest.mark.parametrize(
    ("name", "write"), [("a.txt", text), ("a.txt", one_line), ("a.img", zeros), ("a.jsonl", rows)]
)
def test_a_big_file_is_read_no_further_than_it_is_wanted(
    tmp_path: Path, name: str, write: Callable[[Path], None]
) -> None:
    write(tmp_path / name)
    tracemalloc.start()
    list(islice(documents(tmp_path / name, "text", max_bytes=300_000), 300))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < BIG // 2
