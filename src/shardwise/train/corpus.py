"""Text from a place on disk, as documents, split for training and validation.

Files are visited in the order of a hash of their names, so that a limit on bytes takes a
fair sample and not everything up to the letter e, the same on every machine. A document belongs
to the validation split if the hash of its *text* says so: copies of a text land on one side,
and adding files moves nothing that was there before.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.errors import ConfigError, nearest
from shardwise.train.config import DataConfig

__all__ = ["Corpus", "Split", "read_corpus", "split"]

STDLIB = "stdlib"
# Tests are mostly data, encodings are tables of characters, and packages are not the library.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages"}
ENOUGH = 50  # with fewer documents, a share of a few per cent is no document at all


@dataclass(frozen=True)
class Corpus:
    """Documents in reading order.

    Attributes:
        name: where they came from, for people.
        documents: the texts.
        nbytes: their size in UTF-8.
        files: files read.
        skipped: files left out because they are not UTF-8 text.
        capped: reading stopped at the limit, so there is more.
    """

    name: str
    documents: tuple[str, ...]
    nbytes: int
    files: int
    skipped: int = 0
    capped: bool = False

    @property
    def digest(self) -> str:
        """A hash of all texts, in order."""
        whole = hashlib.sha256()
        for document in self.documents:
            whole.update(_hash(document))
        return whole.hexdigest()


@dataclass(frozen=True)
class Split:
    """Documents to learn from, and documents held out. No text is in both."""

    training: tuple[str, ...]
    validation: tuple[str, ...]


def read_corpus(config: DataConfig) -> Corpus:
    """The documents of ``config.source``, up to about ``config.max_bytes``.

    Raises:
        ConfigError: nothing is there, nothing is readable, or a field is missing; with the names
            that there are.
    """
    root, files = _files(config.source)
    reading = _Reading(config.max_bytes)
    for file in sorted(files, key=lambda path: _hash(path.relative_to(root).as_posix())):
        reading.take(file, config.field)
        if reading.capped:
            break
    if not reading.documents:
        raise ConfigError(
            f"data.source {config.source!r} holds no text: {len(files)} files were opened, "
            f"{reading.skipped} of them are not UTF-8 text. Name a file or a folder of text, "
            "JSONL or parquet."
        )
    name = "Python's standard library" if config.source == STDLIB else str(root)
    documents = tuple(reading.documents)
    return Corpus(name, documents, reading.nbytes, reading.files, reading.skipped, reading.capped)


def split(corpus: Corpus, share: float) -> Split:
    """About ``share`` of the documents for validation, at least one on each side.

    A corpus of few documents (one big file, say) is first cut at line ends into pieces.

    Raises:
        ConfigError: the corpus is too small to be divided.
    """
    documents = corpus.documents
    if len(documents) < ENOUGH:
        documents = tuple(_pieces(documents, size=max(1, corpus.nbytes // (4 * ENOUGH))))
    distinct = sorted({_hash(text) for text in documents})
    if len(distinct) < 2:
        raise ConfigError(
            f"{corpus.name} holds {len(distinct)} piece of text ({corpus.nbytes} bytes), which "
            "cannot be divided into training and validation; give it more text."
        )
    # The lowest hash validates and the highest trains, however small the share.
    limit = min(max(int(share * 2**256).to_bytes(32, "big"), distinct[0]), distinct[-2])
    held_out = [_hash(text) <= limit for text in documents]
    return Split(
        tuple(text for text, out in zip(documents, held_out, strict=True) if not out),
        tuple(text for text, out in zip(documents, held_out, strict=True) if out),
    )


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _pieces(documents: Sequence[str], size: int) -> Iterator[str]:
    """Each document cut at line ends into pieces of ``size`` characters or a line more."""
    for document in documents:
        piece: list[str] = []
        for line in document.splitlines(keepends=True):
            piece.append(line)
            if sum(map(len, piece)) >= size:
                yield "".join(piece)
                piece = []
        if piece:
            yield "".join(piece)


# --- where the files are ---------------------------------------------------------------------


def _files(source: str) -> tuple[Path, list[Path]]:
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        return root, [path for path in root.rglob("*.py") if _is_library(path.relative_to(root))]
    root = Path(source).expanduser()
    if not root.exists():
        raise ConfigError(
            f"data.source {source!r} does not exist (looked in {Path.cwd()}); name a file or a "
            f"folder of text, JSONL or parquet, or {STDLIB!r} for Python's own source."
        )
    if root.is_file():
        return root.parent, [root]
    files = [path for path in root.rglob("*") if path.is_file() and not _is_hidden(path, root)]
    if not files:
        raise ConfigError(f"data.source {source!r} is a folder without files; put text in it.")
    return root, files


def _is_library(path: Path) -> bool:
    # _sysconfigdata holds this machine's paths, which nobody wants to learn.
    return not SKIPPED_FOLDERS & set(path.parts) and not path.name.startswith("_sysconfigdata")


def _is_hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


# --- what is in them -------------------------------------------------------------------------


@dataclass
class _Reading:
    """Documents taken so far, up to a limit."""

    limit: int
    documents: list[str] = field(default_factory=list)
    nbytes: int = 0
    files: int = 0
    skipped: int = 0
    capped: bool = False

    def take(self, file: Path, column: str) -> None:
        """Every document of one file; the one that meets the limit is cut there."""
        reader = {".jsonl": _jsonl, ".parquet": _parquet}.get(file.suffix, _text)
        try:
            self.files += 1
            for document in reader(file, column):
                text = document.encode("utf-8", "replace")[: self.limit - self.nbytes]
                if text.strip():
                    self.documents.append(text.decode("utf-8", "ignore"))
                    self.nbytes += len(text)
                if self.nbytes >= self.limit:
                    self.capped = True
                    return
        except UnicodeDecodeError:
            self.skipped += 1


def _text(file: Path, _column: str) -> Iterator[str]:
    yield file.read_text("utf-8")


def _jsonl(file: Path, column: str) -> Iterator[str]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{where}: this line is not JSON ({error}).") from None
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: expected a JSON object with a field {column!r}.")
            yield _string(row.get(column), column, list(row), where)


def _parquet(file: Path, column: str) -> Iterator[str]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise ConfigError(
            f"{file} is parquet, which needs pyarrow: pip install 'shardwise[train]'."
        ) from None
    try:
        table = parquet.ParquetFile(file)
    except ArrowInvalid as error:
        raise ConfigError(f"{file} is not a parquet file: {error}") from None
    columns = list(table.schema_arrow.names)
    _check_column(column, columns, str(file))
    for batch in table.iter_batches(columns=[column], batch_size=1024):
        for value in batch.column(0).to_pylist():
            yield _string(value, column, columns, str(file))


def _string(value: object, column: str, columns: list[str], where: str) -> str:
    _check_column(column, columns, where)
    if not isinstance(value, str):
        raise ConfigError(
            f"{where}: {column!r} holds {type(value).__name__}, not text. "
            f"Fields there: {', '.join(columns)}; choose one with --data.field."
        )
    return value


def _check_column(column: str, columns: list[str], where: str) -> None:
    if column not in columns:
        near = nearest(column, columns, limit=1)
        hint = f" Nearest is {near[0]!r}; choose it with --data.field {near[0]}." if near else ""
        raise ConfigError(
            f"{where}: there is no field {column!r}. Fields there: {', '.join(columns)}.{hint}"
        )
