"""What a file holds: documents, and rows that cannot be used, one after the other.

    a.txt, b.py, …          one document; a line that is not UTF-8 is left out of it
    a.jsonl, a.ndjson       a document per line. So is a.json if its first line is such a row
    a.parquet               a document per row
    any but parquet + .gz   the same, compressed

A file is read in pieces, so memory does not grow with its size, and a row that cannot be used
costs that row: the ready readers (pyarrow's, and `datasets` above it) give up the rest of a file at
the first row that is not JSON, and pass bytes on that are not UTF-8.
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

__all__ = ["Unusable", "documents"]

HEAD = 8192  # bytes in which a file that is not text shows itself by a zero, as for git
BLOCK = 1 << 20  # bytes of text read at once
ROW = 1 << 24  # bytes; a longer row of JSON is left out
TRIED = 1000  # rows without the field, and none with it, after which it is a wrong field
BATCH = 256  # parquet rows in memory
BOM = b"\xef\xbb\xbf"
BROKEN = (EOFError, gzip.BadGzipFile, zlib.error)  # what a broken archive raises
NOT_UTF_8 = "not UTF-8"
TEXT = "text"  # what a field that can be learnt from holds; the others are named by their type


@dataclass(frozen=True)
class Unusable:
    """What of a file cannot be used.

    Attributes:
        reason: in a few words.
        where: the file, and the place in it.
        rows: how many are affected; 0 = all of the file, or the rest of it.
        fields: of a row without text in the field that was asked for: name → type.
    """

    reason: str
    where: str
    rows: int = 1
    fields: Mapping[str, str] = field(default_factory=dict)


Document = str | Unusable


def documents(file: Path, column: str, most: float) -> Iterator[Document]:
    """The documents of ``file``.

    Args:
        column: the field that holds the text, where there are fields.
        most: bytes of text that are wanted; a document may end there.

    Raises:
        ConfigError: there are rows, and none has text in ``column``.
        OSError: the file cannot be read.
    """
    if file.suffix == ".parquet":
        yield from _with_text(_parquet(file, column), column)
        return
    with _opened(file) as stream:
        head = _head(stream)
        kind = Path(file.name.removesuffix(".gz")).suffix
        if b"\0" in head:
            yield Unusable("not text", str(file), rows=0)
        elif kind == ".json" and _is_array_of_rows(head, column):
            yield Unusable("a JSON array; jq -c '.[]' makes a row per line", str(file), rows=0)
        elif kind in (".jsonl", ".ndjson") or (kind == ".json" and _is_row(head, column)):
            yield from _with_text(_jsonl(stream, str(file), column), column)
        else:
            yield from _text(stream, str(file), most)


def _opened(file: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(file)) if file.suffix == ".gz" else file.open("rb")


def _head(stream: IO[bytes]) -> bytes:
    """The first bytes of text; the stream is then where they begin."""
    try:
        head = stream.read(HEAD)
    except BROKEN:
        head = b""
    stream.seek(len(BOM) if head.startswith(BOM) else 0)
    return head.removeprefix(BOM)


def _is_array_of_rows(head: bytes, column: str) -> bool:
    return head.lstrip().startswith(b"[") and json.dumps(column).encode() in head


def _is_row(head: bytes, column: str) -> bool:
    """Whether the first line is a row with text in ``column``, as far as ``head`` shows."""
    line, ends, _ = head.partition(b"\n")
    if ends or len(head) < HEAD - len(BOM):
        return isinstance(_of_json(line, "", column), str)
    return line.startswith(b"{") and json.dumps(column).encode() in line


def _with_text(rows: Iterator[Document], column: str) -> Iterator[Document]:
    """``rows``; an error if none of them, or of the first thousand, has text in ``column``."""
    first: Unusable | None = None
    for number, row in enumerate(rows, start=1):
        if isinstance(row, str):
            yield row
            yield from rows
            return
        first = first or (row if row.fields else None)
        if first and number >= TRIED:
            break
        yield row
    if first is not None:
        raise ConfigError(_no_text(first, column))


def _no_text(row: Unusable, column: str) -> str:
    known = [name for name, kind in row.fields.items() if kind == TEXT]
    near = nearest(column, known, limit=1)
    fields = ", ".join(f"{name} ({kind})" for name, kind in row.fields.items())
    what = (
        f"Choose one that holds text, such as --data.field {near[0]}."
        if near
        else "None holds text; write what is to be learnt into one field, as text."
    )
    return f"{row.where}: {row.reason}. Fields there: {fields}. {what}"


# --- text and JSON ---------------------------------------------------------------------------


def _until_broken(read: Callable[[], bytes], name: str) -> Iterator[bytes | Unusable]:
    """What ``read`` returns, to the end of the file or to where an archive is broken."""
    try:
        while piece := read():
            yield piece
    except BROKEN:
        yield Unusable("broken archive, the rest of it", name, rows=0)


def _text(stream: IO[bytes], name: str, most: float) -> Iterator[Document]:
    kept: list[str] = []
    number, size = 1, 0
    for block in _blocks(stream, name):
        if isinstance(block, Unusable):
            yield block
            continue
        for text in _decoded(block, name, number):
            if isinstance(text, Unusable):
                yield text
            else:
                kept.append(text)
        number, size = number + block.count(b"\n"), size + len(block)
        if size >= most:
            break
    yield "".join(kept).replace("\r\n", "\n").replace("\r", "\n")


def _blocks(stream: IO[bytes], name: str) -> Iterator[bytes | Unusable]:
    """The stream in blocks that end with a line, or where a line is too long with a character."""
    rest = b""
    for block in _until_broken(lambda: stream.read(BLOCK) + stream.readline(BLOCK), name):
        if isinstance(block, Unusable):
            yield block
            continue
        whole = rest + block
        end = _last_character(whole)
        yield whole[:end]
        rest = whole[end:]
    yield rest


def _last_character(data: bytes) -> int:
    """Where the last character begins if it has several bytes, for it may be torn; else the end."""
    begin = len(data) - 1
    while begin > 0 and data[begin] & 0xC0 == 0x80 and len(data) - begin < 4:
        begin -= 1
    return begin if data[begin] >= 0xC0 else len(data)


def _decoded(data: bytes, name: str, number: int) -> Iterator[Document]:
    """``data`` as text; where it is not UTF-8, without the lines that are not.

    Args:
        number: of its first line.
    """
    try:
        yield data.decode()
    except UnicodeDecodeError:
        for at, line in enumerate(BytesIO(data), start=number):
            try:
                yield line.decode()
            except UnicodeDecodeError:
                yield Unusable(NOT_UTF_8, f"{name}:{at}")


def _jsonl(stream: IO[bytes], name: str, column: str) -> Iterator[Document]:
    number, in_long = 1, False
    for line in _until_broken(lambda: stream.readline(ROW), name):
        if isinstance(line, Unusable):
            yield line
            return
        is_part = len(line) == ROW and not line.endswith(b"\n")
        if is_part and not in_long:
            yield Unusable(f"longer than {ROW:,} bytes", f"{name}:{number}")
        elif not in_long and line.strip():
            yield _of_json(line, f"{name}:{number}", column)
        in_long = is_part
        number += not is_part


def _of_json(line: bytes, where: str, column: str) -> Document:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError:
        return Unusable(NOT_UTF_8, where)
    except (ValueError, RecursionError):
        return Unusable("not JSON", where)
    if not isinstance(row, dict):
        return Unusable("not a JSON object", where)
    value = row.get(column)
    if isinstance(value, str):
        return value
    if column in row and value is None:
        return Unusable(f"{column!r} is null", where)
    kinds = {name: TEXT if isinstance(v, str) else type(v).__name__ for name, v in row.items()}
    return Unusable(_wrong(column, kinds), where, fields=kinds)


def _wrong(column: str, kinds: Mapping[str, str]) -> str:
    return f"{column!r} is {kinds[column]}, not text" if column in kinds else f"no field {column!r}"


# --- parquet ---------------------------------------------------------------------------------


def _parquet(file: Path, column: str) -> Iterator[Document]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ConfigError(
            f"{file} is parquet, which needs pyarrow: pip install 'shardwise[train]'."
        ) from None
    try:
        table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=BLOCK)
    except (ArrowException, OSError) as error:
        yield _damage(error, "not parquet", str(file), rows=0)
        return
    kinds = {each.name: _kind(each.type) for each in table.schema_arrow}
    if kinds.get(column) != TEXT:
        yield Unusable(_wrong(column, kinds), str(file), table.metadata.num_rows, kinds)
        return
    row = 0
    for group in range(table.num_row_groups):
        batches = table.iter_batches(BATCH, row_groups=[group], columns=[column])
        end = row + table.metadata.row_group(group).num_rows
        try:
            for value in (value for batch in batches for value in batch.column(0).to_pylist()):
                row += 1
                is_null = value is None
                yield Unusable(f"{column!r} is null", f"{file}:{row}") if is_null else value
        except (ArrowException, OSError) as error:
            yield _damage(error, "damaged", f"{file}:{row + 1}", rows=end - row)
            row = end


def _damage(error: Exception, reason: str, where: str, rows: int) -> Unusable:
    """What pyarrow's ``error`` means; raised again if the disk is at fault, and not the file."""
    if getattr(error, "errno", None) is not None:
        raise error
    return Unusable(reason, where, rows)


def _kind(kind: Any) -> str:
    """``TEXT`` where values are ``str``, else the type's name."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return _kind(kind.value_type)
    texts = (types.is_string, types.is_large_string, types.is_string_view)
    return TEXT if any(is_text(kind) for is_text in texts) else str(kind)
