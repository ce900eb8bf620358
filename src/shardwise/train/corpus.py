"""Documents from files on disk, split for training and validation.

Files are read in the order of a hash of their names, so that a limit on bytes takes a fair sample,
the same on every machine. The hash of a document's *text* decides its split: copies of a text are
in the same split, and adding files moves no other document.
"""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.recipe.data_config import DataConfig
from shardwise.train.formats import Skipped, documents
from shardwise.train.records import LeftOut, plural

STDLIB = "stdlib"
# Tests are mostly data, encodings are character tables, packages are not the standard library.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages"}
MIN_DOCUMENTS = 50  # with fewer documents, a few per cent would be none
MAX_LINE = 1000  # characters; longer lines are cut, too, where documents are cut
MAX_PLACES = 3  # places named in a message about skipped text


@dataclass(frozen=True)
class Corpus:
    """Documents in reading order.

    Attributes:
        name: of the source, for messages.
        documents: the texts.
        nbytes: their size in UTF-8.
        files: files read.
        left_out: files and rows that could not be used, by reason.
        capped: reading stopped at the limit.
    """

    name: str
    documents: tuple[str, ...]
    nbytes: int
    files: int
    left_out: tuple[LeftOut, ...] = ()
    capped: bool = False


@dataclass(frozen=True)
class Split:
    """Documents to train on, and documents held out. No text is in both."""

    training: tuple[str, ...]
    validation: tuple[str, ...]


def read_corpus(config: DataConfig) -> Corpus:
    """The documents of ``config.source``, up to about ``config.max_bytes``.

    Raises:
        ConfigError: there are no files, a file cannot be read, or no row has the field; with the
            fields that exist.
    """
    reader = _Reader(math.inf if config.max_bytes is None else config.max_bytes)
    with readable(config.source):
        files = source_files(config.source)[1]
        for path in files:
            reader.take(path, config.field)
            if reader.capped:
                break
    left_out = tuple(reader.left_out.values())
    if not reader.documents:
        skipped = "".join(f" Left out: {out}." for out in left_out)
        raise ConfigError(
            f"data.source {config.source!r} holds no text; {plural(len(files), 'file')} "
            f"{'was' if len(files) == 1 else 'were'} opened.{skipped} Name a file or a folder of "
            "text, JSONL or parquet."
        )
    name = "Python's standard library" if config.source == STDLIB else config.source
    texts = tuple(reader.documents)
    return Corpus(name, texts, reader.nbytes, reader.files, left_out, reader.capped)


@contextmanager
def readable(source: str) -> Iterator[None]:
    """An ``OSError`` while the files of ``source`` are read, as a ``ConfigError``."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"data.source {source!r}: {error.filename or source} cannot be read "
            f"({error.strerror or error}). Repair it, or name a source without it."
        ) from error


def source_files(source: str) -> tuple[Path, list[Path]]:
    """The root of a source on disk, and its files in the order in which they are read."""
    root, files = _files(source)
    return root, sorted(files, key=lambda path: _hash(path.relative_to(root).as_posix()))


def is_held_out(text: str, share: float) -> bool:
    """Is this text one of the ``share`` of all texts that are for validation?"""
    return _hash(text) <= _limit(share)


def split(corpus: Corpus, share: float) -> Split:
    """About ``share`` of the documents for validation, at least one on each side.

    A corpus of few documents (one big file, say) is first cut into pieces, at line ends if lines
    are not very long.

    Raises:
        ConfigError: the corpus is too small to be divided.
    """
    texts: Sequence[str] = corpus.documents
    if len(texts) < MIN_DOCUMENTS:
        texts = tuple(_cut(texts, size=max(1, corpus.nbytes // (4 * MIN_DOCUMENTS))))
    hashes = [_hash(text) for text in texts]
    distinct = sorted(set(hashes))
    if len(distinct) < 2:
        raise ConfigError(
            f"{corpus.name} ({corpus.nbytes:,} bytes) is one line, or one repeated piece of text, "
            "and cannot be split for validation. Give it more text."
        )
    # The lowest hash is always for validation and the highest for training.
    limit = min(max(_limit(share), distinct[0]), distinct[-2])
    pairs = list(zip(texts, hashes, strict=True))
    return Split(
        tuple(text for text, number in pairs if number > limit),
        tuple(text for text, number in pairs if number <= limit),
    )


def _limit(share: float) -> bytes:
    return int(share * 2**256).to_bytes(32, "big")


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _cut(texts: Sequence[str], size: int) -> Iterator[str]:
    """Each text in pieces of ``size`` characters, extended to the end of a line."""
    for text in texts:
        start = 0
        while start < len(text):
            end = _end_of_piece(text, start + size)
            yield text[start:end]
            start = end


def _end_of_piece(text: str, start: int) -> int:
    """The first line end from ``start`` on; in a very long line, the last space."""
    latest = start + MAX_LINE
    line = text.find("\n", start - 1, latest)
    if line >= 0:
        return line + 1
    return len(text) if len(text) <= latest else text.rfind(" ", start, latest) + 1 or latest


# --- files -----------------------------------------------------------------------------------


def _files(source: str) -> tuple[Path, list[Path]]:
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        return root, list(_library(root))
    root = Path(source).expanduser()
    if not root.exists():
        raise ConfigError(
            f"data.source {source!r} does not exist (looked in {Path.cwd()}); name a file or a "
            f"folder of text, JSONL or parquet, or {STDLIB!r} for Python's own source."
        )
    if root.is_file():
        return root.parent, [root]
    files = list(_walk(root))
    if not files:
        raise ConfigError(f"data.source {source!r} is a folder without files; put text in it.")
    return root, files


def _walk(root: Path) -> Iterator[Path]:
    """The files below ``root`` that are not hidden. Links are followed; a folder is read once."""

    def fail(error: OSError) -> None:
        raise error

    seen: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=fail):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files = (Path(folder, name) for name in names if not name.startswith("."))
        yield from (path for path in files if path.is_file() or not path.exists())


def _library(root: Path) -> Iterator[Path]:
    """Python's own modules. Packages are not entered: they may be ten times as many files."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        # _sysconfigdata holds paths of this machine, which should not be trained on.
        modules = (n for n in names if n.endswith(".py") and not n.startswith("_sysconfigdata"))
        yield from (Path(folder, name) for name in modules)


# --- documents -------------------------------------------------------------------------------


@dataclass
class _Reader:
    """The documents read so far, up to ``limit`` bytes; ``left_out`` by its reason."""

    limit: float
    documents: list[str] = field(default_factory=list)
    nbytes: int = 0
    files: int = 0
    left_out: dict[str, LeftOut] = field(default_factory=dict)
    capped: bool = False

    def take(self, file: Path, column: str) -> None:
        """Read every document of ``file``; the one that exceeds the limit is cut."""
        self.files += 1
        for document in documents(file, column, max_bytes=self.limit - self.nbytes + 1):
            if isinstance(document, Skipped):
                self._skip(document)
            elif document.strip():
                self._add(document)
            if self.capped:
                return

    def _add(self, text: str) -> None:
        bytes_left, data = self.limit - self.nbytes, text.encode("utf-8", "replace")
        if len(data) > bytes_left:
            self.capped = True
            data = data[: int(bytes_left)]
        if data:
            self.documents.append(data.decode("utf-8", "ignore"))
            self.nbytes += len(data)

    def _skip(self, skipped: Skipped) -> None:
        previous = self.left_out.get(skipped.reason, LeftOut(skipped.reason))
        places = (*previous.places, skipped.where)[:MAX_PLACES]
        files, rows = previous.files + (skipped.rows == 0), previous.rows + skipped.rows
        self.left_out[skipped.reason] = replace(previous, files=files, rows=rows, places=places)
