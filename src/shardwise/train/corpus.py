"""Text from a place on disk, as documents, split for training and validation.

Files are visited in the order of a hash of their names, so that a limit on bytes takes a
fair sample and not everything up to the letter e, the same on every machine. A document belongs
to the validation split if the hash of its *text* says so: copies of a text land on one side,
and adding files moves nothing that was there before.
"""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.train.config import DataConfig
from shardwise.train.formats import Unusable, documents
from shardwise.train.metrics import LeftOut, count

__all__ = ["Corpus", "Split", "read_corpus", "split"]

STDLIB = "stdlib"
# Tests are mostly data, encodings are tables of characters, and packages are not the library.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages"}
ENOUGH = 50  # with fewer documents, a share of a few per cent is no document at all
LINE = 1000  # characters of a longest line that is kept whole where documents are cut
NAMED = 3  # places that are named of all where something was left out


@dataclass(frozen=True)
class Corpus:
    """Documents in reading order.

    Attributes:
        name: where they came from, for people.
        documents: the texts.
        nbytes: their size in UTF-8.
        files: files read.
        left_out: what of them could not be used, by reason.
        capped: reading stopped at the limit, so there is more.
    """

    name: str
    documents: tuple[str, ...]
    nbytes: int
    files: int
    left_out: tuple[LeftOut, ...] = ()
    capped: bool = False


@dataclass(frozen=True)
class Split:
    """Documents to learn from, and documents held out. No text is in both."""

    training: tuple[str, ...]
    validation: tuple[str, ...]


def read_corpus(config: DataConfig) -> Corpus:
    """The documents of ``config.source``, up to about ``config.max_bytes``.

    Raises:
        ConfigError: nothing is there, a file cannot be read, no row has the field; with the names
            that there are.
    """
    reading = _Reading(math.inf if config.max_bytes is None else config.max_bytes)
    at = Path(config.source)
    try:
        root, files = _files(config.source)
        for at in sorted(files, key=lambda path: _hash(path.relative_to(root).as_posix())):
            reading.take(at, config.field)
            if reading.capped:
                break
    except OSError as error:
        raise ConfigError(
            f"data.source {config.source!r}: {error.filename or at} cannot be read "
            f"({error.strerror or error}). Mend that, or name a source without it."
        ) from error
    left_out = tuple(reading.left_out.values())
    if not reading.documents:
        told = "".join(f" Left out: {out}." for out in left_out)
        raise ConfigError(
            f"data.source {config.source!r} holds no text; {count(len(files), 'file')} "
            f"{'was' if len(files) == 1 else 'were'} opened.{told} Name a file or a folder of "
            "text, JSONL or parquet."
        )
    name = "Python's standard library" if config.source == STDLIB else config.source
    texts = tuple(reading.documents)
    return Corpus(name, texts, reading.nbytes, reading.files, left_out, reading.capped)


def split(corpus: Corpus, share: float) -> Split:
    """About ``share`` of the documents for validation, at least one on each side.

    A corpus of few documents (one big file, say) is first cut into pieces, at line ends if lines
    are not very long.

    Raises:
        ConfigError: the corpus is too small to be divided.
    """
    texts: Sequence[str] = corpus.documents
    if len(texts) < ENOUGH:
        texts = tuple(_pieces(texts, size=max(1, corpus.nbytes // (4 * ENOUGH))))
    hashes = [_hash(text) for text in texts]
    distinct = sorted(set(hashes))
    if len(distinct) < 2:
        raise ConfigError(
            f"{corpus.name} ({corpus.nbytes:,} bytes) is one line, or one piece of text again and "
            "again; cannot split off validation. Give it more text."
        )
    # The lowest hash validates and the highest trains, however small the share.
    limit = min(max(int(share * 2**256).to_bytes(32, "big"), distinct[0]), distinct[-2])
    pairs = list(zip(texts, hashes, strict=True))
    return Split(
        tuple(text for text, number in pairs if number > limit),
        tuple(text for text, number in pairs if number <= limit),
    )


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _pieces(texts: Sequence[str], size: int) -> Iterator[str]:
    """Each text cut into pieces of ``size`` characters or a line more."""
    for text in texts:
        start = 0
        while start < len(text):
            end = _end_of_piece(text, start + size)
            yield text[start:end]
            start = end


def _end_of_piece(text: str, least: int) -> int:
    """The first line end from ``least`` on; in a line that is very long, the last space."""
    most = least + LINE
    line = text.find("\n", least - 1, most)
    if line >= 0:
        return line + 1
    return len(text) if len(text) <= most else text.rfind(" ", least, most) + 1 or most


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
    files = list(_walk(root))
    if not files:
        raise ConfigError(f"data.source {source!r} is a folder without files; put text in it.")
    return root, files


def _walk(root: Path) -> Iterator[Path]:
    """The files below ``root`` that are not hidden. Links are followed, each folder once."""

    def fail(error: OSError) -> None:
        raise error

    seen: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=fail):
        at = Path(folder).stat()
        if (at.st_dev, at.st_ino) in seen:
            folders.clear()
            continue
        seen.add((at.st_dev, at.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files = (Path(folder, name) for name in names if not name.startswith("."))
        yield from (path for path in files if path.is_file() or not path.exists())


def _is_library(path: Path) -> bool:
    # _sysconfigdata holds this machine's paths, which nobody wants to learn.
    return not SKIPPED_FOLDERS & set(path.parts) and not path.name.startswith("_sysconfigdata")


# --- what is in them -------------------------------------------------------------------------


@dataclass
class _Reading:
    """What was taken so far, up to ``limit`` bytes; ``left_out`` by its reason."""

    limit: float
    documents: list[str] = field(default_factory=list)
    nbytes: int = 0
    files: int = 0
    left_out: dict[str, LeftOut] = field(default_factory=dict)
    capped: bool = False

    def take(self, file: Path, column: str) -> None:
        """Every document of one file; the one that goes over the limit is cut there."""
        self.files += 1
        for document in documents(file, column, most=self.limit - self.nbytes + 1):
            if isinstance(document, Unusable):
                self._leave_out(document)
            elif document.strip():
                self._add(document)
            if self.capped:
                return

    def _add(self, text: str) -> None:
        room, data = self.limit - self.nbytes, text.encode("utf-8", "replace")
        if len(data) > room:
            self.capped = True
            data = data[: int(room)]
        if data:
            self.documents.append(data.decode("utf-8", "ignore"))
            self.nbytes += len(data)

    def _leave_out(self, it: Unusable) -> None:
        before = self.left_out.get(it.reason, LeftOut(it.reason))
        places = (*before.places, it.where)[:NAMED]
        files, rows = before.files + (it.rows == 0), before.rows + it.rows
        self.left_out[it.reason] = replace(before, files=files, rows=rows, places=places)
