"""Reading the documents of a file, and reporting the rows that cannot be used.

    a.txt, b.py, …          one document, without lines that are not UTF-8
    a.jsonl, a.ndjson       a document per line; a.json, too, if its first line is such a row
    a.parquet               a document per row
    any but parquet + .gz   the same, compressed

A file is read in blocks, so memory does not grow with its size, and only a row that cannot be used
is skipped. pyarrow's reader, and `datasets` above it, stop at the first row that is not JSON, and
accept bytes that are not UTF-8.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import IO, Any, cast

from shardwise.errors import ConfigError, nearest
from shardwise.train.libraries import library

HEAD_BYTES = 8192  # bytes; a zero byte in them means that the file is binary, as for git
BLOCK = 1 << 20  # bytes of text read at once
MAX_ROW = 1 << 24  # bytes; a longer row of JSON is left out
MAX_TRIED_ROWS = 1000  # first rows; if none of them has the field, the field is wrong
BATCH = 256  # parquet rows in memory
BOM = b"\xef\xbb\xbf"
BROKEN = (EOFError, gzip.BadGzipFile, zlib.error)  # errors of a broken archive
NOT_UTF_8 = "not UTF-8"
TEXT = "text"  # type name of a field that can be used; other fields have their type's name


@dataclass(frozen=True)
class Skipped:
    """A part of a file that cannot be used.

    Attributes:
        reason: in a few words.
        where: the file and the line.
        rows: the number of rows; 0 = all or the rest of the file.
        fields: name → type, of a row without text in the chosen field.
    """

    reason: str
    where: str
    rows: int = 1
    fields: Mapping[str, str] = field(default_factory=dict)


Document = str | Skipped


def documents(file: Path, column: str, max_bytes: float) -> Iterator[Document]:
    """The documents of ``file``.

    Args:
        column: the field of the text, in formats with fields.
        max_bytes: stop reading after this many bytes of text.

    Raises:
        ConfigError: no row has text in ``column``.
        OSError: the file cannot be read.
    """
    if file.suffix == ".parquet":
        yield from _require_text(_read_parquet(file, column), column)
        return
    with _open(file) as stream:
        head = _peek(stream)
        type_name = Path(file.name.removesuffix(".gz")).suffix
        is_array = head.lstrip().startswith(b"[") and json.dumps(column).encode() in head
        if b"\0" in head:
            yield Skipped("not text", str(file), rows=0)
        elif type_name == ".json" and is_array:
            yield Skipped("a JSON array; jq -c '.[]' makes a row per line", str(file), rows=0)
        elif type_name in (".jsonl", ".ndjson") or (type_name == ".json" and _is_row(head, column)):
            yield from _require_text(_read_jsonl(stream, str(file), column), column)
        else:
            yield from _read_text(stream, str(file), max_bytes)


def _open(file: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(file)) if file.suffix == ".gz" else file.open("rb")


def _peek(stream: IO[bytes]) -> bytes:
    """The first bytes of text; the stream is positioned at their start."""
    try:
        head = stream.read(HEAD_BYTES)
    except BROKEN:
        head = b""
    stream.seek(len(BOM) if head.startswith(BOM) else 0)
    return head.removeprefix(BOM)


def _is_row(head: bytes, column: str) -> bool:
    """Test that the first line is a row with text in ``column``, as far as ``head`` shows."""
    line, ends, _ = head.partition(b"\n")
    if ends or len(head) < HEAD_BYTES - len(BOM):
        return isinstance(_parse_row(line, "", column), str)
    return line.startswith(b"{") and json.dumps(column).encode() in line


def _require_text(rows: Iterator[Document], column: str) -> Iterator[Document]:
    """``rows``; raises if none of them, or of the first thousand, has text in ``column``."""
    first: Skipped | None = None
    for number, row in enumerate(rows, start=1):
        if isinstance(row, str):
            yield row
            yield from rows
            return
        first = first or (row if row.fields else None)
        if first and number >= MAX_TRIED_ROWS:
            break
        yield row
    if first is not None:
        raise ConfigError(_no_text_message(first, column))


def _no_text_message(row: Skipped, column: str) -> str:
    text_fields = [name for name, type_name in row.fields.items() if type_name == TEXT]
    similar = nearest(column, text_fields, limit=1)
    fields = ", ".join(f"{name} ({type_name})" for name, type_name in row.fields.items())
    advice = (
        f"Choose one that holds text, such as --data.field {similar[0]}."
        if similar
        else "No field is text; write the text to train on into one field."
    )
    return f"{row.where}: {row.reason}. Fields there: {fields}. {advice}"


# --- text and JSON ---------------------------------------------------------------------------


def _read_until_broken(read: Callable[[], bytes], name: str) -> Iterator[bytes | Skipped]:
    """The results of ``read`` up to the end of the file, or to an error in the archive."""
    try:
        while data := read():
            yield data
    except BROKEN:
        yield Skipped("broken archive, the rest of it", name, rows=0)


def _read_text(stream: IO[bytes], name: str, max_bytes: float) -> Iterator[Document]:
    texts: list[str] = []
    number, size = 1, 0
    for block in _blocks(stream, name):
        if isinstance(block, Skipped):
            yield block
            continue
        for text in _decoded(block, name, number):
            if isinstance(text, Skipped):
                yield text
            else:
                texts.append(text)
        number, size = number + block.count(b"\n"), size + len(block)
        if size >= max_bytes:
            break
    yield "".join(texts).replace("\r\n", "\n").replace("\r", "\n")


def _blocks(stream: IO[bytes], name: str) -> Iterator[bytes | Skipped]:
    """The stream in blocks that end at a line end, or in a long line at a character's end."""
    remainder = b""
    for block in _read_until_broken(lambda: stream.read(BLOCK) + stream.readline(BLOCK), name):
        if isinstance(block, Skipped):
            yield block
            continue
        data = remainder + block
        end = _last_character(data)
        yield data[:end]
        remainder = data[end:]
    yield remainder


def _last_character(data: bytes) -> int:
    """The start of the last character if it has several bytes and may be cut; else the end."""
    start = len(data) - 1
    while start > 0 and data[start] & 0xC0 == 0x80 and len(data) - start < 4:
        start -= 1
    return start if data[start] >= 0xC0 else len(data)


def _decoded(data: bytes, name: str, number: int) -> Iterator[Document]:
    """``data`` as text, without lines that are not UTF-8.

    Args:
        number: of the first line.
    """
    try:
        yield data.decode()
    except UnicodeDecodeError:
        for line_number, line in enumerate(BytesIO(data), start=number):
            try:
                yield line.decode()
            except UnicodeDecodeError:
                yield Skipped(NOT_UTF_8, f"{name}:{line_number}")


def _read_jsonl(stream: IO[bytes], name: str, column: str) -> Iterator[Document]:
    number, in_long = 1, False
    for line in _read_until_broken(lambda: stream.readline(MAX_ROW), name):
        if isinstance(line, Skipped):
            yield line
            return
        is_part = len(line) == MAX_ROW and not line.endswith(b"\n")
        if is_part and not in_long:
            yield Skipped(f"longer than {MAX_ROW:,} bytes", f"{name}:{number}")
        elif not in_long and line.strip():
            yield _parse_row(line, f"{name}:{number}", column)
        in_long = is_part
        number += not is_part


def _parse_row(line: bytes, where: str, column: str) -> Document:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError:
        return Skipped(NOT_UTF_8, where)
    except (ValueError, RecursionError):
        return Skipped("not JSON", where)
    if not isinstance(row, dict):
        return Skipped("not a JSON object", where)
    value = row.get(column)
    if isinstance(value, str):  # JSON may escape half a surrogate pair, which no tokenizer takes
        return value.encode("utf-8", "replace").decode()
    if column in row and value is None:
        return Skipped(f"{column!r} is null", where)
    types = {name: TEXT if isinstance(v, str) else type(v).__name__ for name, v in row.items()}
    return Skipped(_type_problem(column, types), where, fields=types)


def _type_problem(column: str, types: Mapping[str, str]) -> str:
    return f"{column!r} is {types[column]}, not text" if column in types else f"no field {column!r}"


# --- parquet ---------------------------------------------------------------------------------


def _read_parquet(file: Path, column: str) -> Iterator[Document]:
    library("pyarrow", f"{file} is parquet and", "train")
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=BLOCK)
    except (ArrowException, OSError) as error:
        yield _damaged(error, "not parquet", str(file), rows=0)
        return
    types = {field.name: _type_name(field.type) for field in table.schema_arrow}
    if types.get(column) != TEXT:
        yield Skipped(_type_problem(column, types), str(file), table.metadata.num_rows, types)
        return
    row = 0
    for group in range(table.num_row_groups):
        batches = table.iter_batches(BATCH, row_groups=[group], columns=[column])
        end = row + table.metadata.row_group(group).num_rows
        try:
            for value in (value for batch in batches for value in batch.column(0).to_pylist()):
                row += 1
                is_null = value is None
                yield Skipped(f"{column!r} is null", f"{file}:{row}") if is_null else value
        except (ArrowException, OSError) as error:
            yield _damaged(error, "damaged", f"{file}:{row + 1}", rows=end - row)
            row = end


def _damaged(error: Exception, reason: str, where: str, rows: int) -> Skipped:
    """The skipped part for pyarrow's ``error``; an error of the disk is raised again."""
    if getattr(error, "errno", None) is not None:
        raise error
    return Skipped(reason, where, rows)


def _type_name(type_name: Any) -> str:
    """``TEXT`` if values are ``str``, else the type's name."""
    from pyarrow import types

    if types.is_dictionary(type_name):
        return _type_name(type_name.value_type)
    texts = (types.is_string, types.is_large_string, types.is_string_view)
    return TEXT if any(is_text(type_name) for is_text in texts) else str(type_name)
