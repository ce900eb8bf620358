"""A source that is read while the model trains: files on disk, or a data set of the hub.

Either is an ``IterableDataset`` of `datasets`, which knows shards, nodes and positions. The hub's
data sets are read as they are. Files are read by ``formats``, so that a bad row costs that row.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import ConfigError
from shardwise.recipe.data_config import HUB, DataConfig
from shardwise.train.corpus import STDLIB, Corpus, Split, is_held_out, readable, source_files
from shardwise.train.formats import documents
from shardwise.train.libraries import library
from shardwise.train.sources import hub_dataset, readable_rows, stream_rows

if TYPE_CHECKING:
    from datasets import IterableDataset

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamedText:
    """A source as a stream of documents, or of rows that hold samples.

    Attributes:
        config: of the recipe.
        dataset: its examples have the text in the field ``config.field``.
        fingerprint: of the files' names and sizes, or of the data set's name and number of shards.
    """

    config: DataConfig
    dataset: IterableDataset
    fingerprint: str

    @property
    def shards(self) -> int:
        return int(self.dataset.num_shards)

    def texts(self, examples: Iterable[Mapping[str, Any]]) -> Iterator[str]:
        """The text of each example.

        Raises:
            ConfigError: an example has no such field, or something else than text in it.
        """
        column = self.config.field
        for example in examples:
            text = example.get(column)
            if not isinstance(text, str):
                fields = ", ".join(f"{name} ({type(v).__name__})" for name, v in example.items())
                raise ConfigError(
                    f"data.source {self.config.source}: an example has no text in the field "
                    f"{column!r}. Its fields: {fields}. Choose one that holds text with "
                    "--data.field."
                )
            yield text

    def rows(self, examples: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The examples, of samples. Raises ``ConfigError`` where one cannot be read."""
        with readable_rows(self.config.source, self.config.split):
            yield from examples

    def read_head(self) -> Corpus:
        """The first documents, up to the one that reaches ``config.max_bytes``."""
        texts, nbytes, limit = list[str](), 0, self.config.max_bytes or 0
        for text in self.texts(self.dataset):
            texts.append(text)
            nbytes += len(text.encode("utf-8", "replace"))
            if nbytes >= limit:
                break
        source = self.config.source
        name = "Python's standard library" if source == STDLIB else source
        return Corpus(name, tuple(texts), nbytes, self.shards, capped=nbytes >= limit)

    def split(self, head: Corpus) -> Split:
        """The head's documents that are for training, and those that no stream gives."""
        texts, share = head.documents, self.config.validation
        held_out = tuple(text for text in texts if is_held_out(text, share))
        return Split(tuple(text for text in texts if not is_held_out(text, share)), held_out)


def open_text(config: DataConfig) -> StreamedText:
    """The source of ``config``; of files only names and sizes are read.

    Raises:
        ConfigError: there is no such source, or `datasets` is not installed.
    """
    datasets = library("datasets", "data.streaming", "data")
    if config.format != "text":
        dataset, content = stream_rows(config.source, config.split)
    elif config.source.startswith(HUB):
        dataset = hub_dataset(config.source, "train", streaming=True)
        content = f"{config.source} {dataset.num_shards}"
    else:
        with readable(config.source):
            root, files = source_files(config.source)
            sizes = [f"{file.relative_to(root).as_posix()} {file.stat().st_size}" for file in files]
        arguments = {"files": [str(file) for file in files], "column": config.field}
        dataset = datasets.IterableDataset.from_generator(read_files, gen_kwargs=arguments)
        content = "\n".join(sizes)
    return StreamedText(config, dataset, hashlib.sha256(content.encode()).hexdigest())


def read_files(files: Sequence[str], column: str) -> Iterator[dict[str, str]]:
    """Examples of the documents in ``files``; the first row that is left out is warned of."""
    for file in files:
        for document in documents(Path(file), column, max_bytes=math.inf):
            if isinstance(document, str):
                yield {column: document}
            else:
                _warn_once(file, document.where, document.reason)


_warned: set[str] = set()


def _warn_once(file: str, where: str, reason: str) -> None:
    """Warn once of each file; several streams and epochs read the same one."""
    if file not in _warned:
        _warned.add(file)
        logger.warning("%s is left out (%s), and so are rows like it.", where, reason)
