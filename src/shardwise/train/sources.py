"""Rows of a data set: of the hub, or JSONL, JSON, parquet, arrow and CSV on this machine.

`datasets` reads them, but JSON. Files are streamed through, so nothing is written to its cache.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.recipe.data_config import BUILDERS, HUB
from shardwise.train.formats import BROKEN
from shardwise.train.json_rows import read_json
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
    errors = _library().exceptions
    try:
        yield
    # It raises a TypeError where a column of one file is of another type in the next.
    except (*BROKEN, OSError, ValueError, LookupError, TypeError, errors.DatasetsError) as error:
        if isinstance(error, ConfigError):
            raise
        problem = str(error).strip() or repr(error)
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
        found = datasets.load_dataset_builder(str(path))
        splits = {str(name): files for name, files in found.config.data_files.items()}
        if split not in splits:
            raise ValueError(f"its splits are {', '.join(splits)}.")
        return _of_files(found.name, [str(file) for file in splits[split]])
    builder = BUILDERS.get(Path(path.name.removesuffix(".gz")).suffix)
    if builder is None:
        raise ConfigError(
            f"data.source {source} is no file of samples: its name must end in "
            f"{', '.join(BUILDERS)}. For a file of text set data.format text."
        )
    return _of_files(builder, [str(path)])


def _as_text(path: str) -> dict[str, Any]:
    """Options that read each column of a CSV file as the text it is: ``007`` stays ``007``."""
    datasets = _library()
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8-sig") as file:
        columns = next(csv.reader(file), [])
    text = datasets.Features({column: datasets.Value("string") for column in columns})
    return {"features": text, "keep_default_na": False}


def _of_files(builder: str, files: list[str]) -> Any:
    """The rows of ``files``, by the name of what reads them; each is a shard."""
    datasets = _library()
    if builder == "json":
        return datasets.IterableDataset.from_generator(read_json, gen_kwargs={"files": files})
    options = _as_text(files[0]) if builder == "csv" else {}
    return datasets.load_dataset(
        builder, data_files=files, split="train", streaming=True, **options
    )
