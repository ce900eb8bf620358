"""Rows of a data set: of the hub, or JSONL, JSON, parquet, arrow and CSV on this machine.

`datasets` reads them. Files are streamed through, so nothing is written to its cache.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.recipe.data_config import BUILDERS, HUB
from shardwise.train.libraries import library

_library = partial(library, "datasets", "this data.source", "data")


def read_rows(source: str, split: str) -> list[dict[str, Any]]:
    """The rows of a source, in order.

    Raises:
        ConfigError: there is no such source or split, or it cannot be read.
    """
    with readable_rows(source, split):
        if source.startswith(HUB):
            return list(hub_dataset(source, split, streaming=False))
        return list(_local(Path(source).expanduser(), source, split))


@contextmanager
def readable_rows(source: str, split: str) -> Iterator[None]:
    """Raise what `datasets` raises about rows of ``source`` as a ``ConfigError``."""
    datasets = _library()
    try:
        yield
    except (OSError, ValueError, LookupError, datasets.exceptions.DatasetsError) as error:
        if isinstance(error, ConfigError):
            raise
        problem = next(_broken_lines(Path(source).expanduser()), str(error).strip() or repr(error))
        raise ConfigError(
            f"data.source {source}, split {split!r}, cannot be read: {problem} Repair it, or name "
            "another source or data.split."
        ) from error


def stream_rows(source: str, split: str) -> tuple[Any, str]:
    """The rows as an ``IterableDataset``, and names and sizes of the files that hold them.

    Raises:
        ConfigError: there is no such source or split.
    """
    if source.startswith(HUB):
        dataset = hub_dataset(source, split, streaming=True)
        return dataset, f"{source} {split} {dataset.num_shards}"
    path = Path(source).expanduser()
    with readable_rows(source, split):
        dataset = _local(path, source, split)
    if isinstance(dataset, _library().Dataset):
        dataset = dataset.to_iterable_dataset()
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return dataset, "\n".join(f"{file.name} {file.stat().st_size}" for file in files)


def hub_dataset(source: str, split: str, streaming: bool) -> Any:
    """A data set of the hub, or of its cache on this machine.

    Raises:
        ConfigError: it cannot be opened.
    """
    owner, name, part = (*source.removeprefix(HUB).split("/", 2), "", "")[:3]
    is_file = Path(part.removesuffix(".gz")).suffix in (*BUILDERS, ".txt")
    inside = {"data_files" if is_file else "name": part} if part else {}
    try:
        datasets = _library()
        return datasets.load_dataset(f"{owner}/{name}", split=split, streaming=streaming, **inside)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.source {source} cannot be opened: {error} It must be {HUB}OWNER/NAME or "
            f"{HUB}OWNER/NAME/CONFIG_OR_FILE, and the hub must be reached. Without a network, "
            "download it elsewhere and name its folder."
        ) from error


def _local(path: Path, source: str, split: str) -> Any:
    datasets = _library()
    if not path.exists():
        hub = f" A data set of the hub is {HUB}{source}." if source.count("/") == 1 else ""
        raise ConfigError(
            f"data.source {source!r} does not exist (looked in {Path.cwd()}); name a file or "
            f"folder of JSONL, JSON, parquet, arrow or CSV.{hub}"
        )
    if path.is_dir():
        if (path / "dataset_dict.json").exists():
            return datasets.load_from_disk(str(path))[split]
        if (path / "state.json").exists():
            return datasets.load_from_disk(str(path))
        return _streamed(source, str(path), split=split)
    builder = BUILDERS.get(Path(path.name.removesuffix(".gz")).suffix)
    if builder is None:
        raise ConfigError(
            f"data.source {source} is no file of samples: its name must end in "
            f"{', '.join(BUILDERS)}. For a file of text set data.format text."
        )
    options = _as_text(path) if builder == "csv" else {}
    return _streamed(source, builder, data_files=[str(path)], split="train", **options)


def _as_text(path: Path) -> dict[str, Any]:
    """Options that read each column of a CSV file as the text it is: ``007`` stays ``007``."""
    datasets = _library()
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as file:
        columns = next(csv.reader(file), [])
    text = datasets.Features({column: datasets.Value("string") for column in columns})
    return {"features": text, "keep_default_na": False}


def _streamed(source: str, *args: str, **options: Any) -> Any:
    try:
        return _library().load_dataset(*args, **options, streaming=True)
    except StopIteration:  # so the library ends where the first file has no row
        raise ConfigError(
            f"data.source {source} has no row in its first file; remove that file, or name another."
        ) from None


def _broken_lines(path: Path) -> Iterator[str]:
    """The lines of a JSONL file that are not JSON; the library's error does not say which."""
    if path.suffix not in (".jsonl", ".ndjson") or not path.is_file():
        return
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            json.loads(line or b"null")
        except ValueError as error:
            yield f"{path}:{number}: {error}."
