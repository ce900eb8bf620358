"""Sources that are read while a model trains: files of every kind, and the hub's data sets."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from shardwise.errors import ConfigError
from shardwise.recipe.data_config import DataConfig
from shardwise.train.corpus import split
from shardwise.train.streamed_text import StreamedText, open_text
from tests.train.tiny import documents, text_folder


def opened(source: object, **data: object) -> StreamedText:
    streaming = {"streams": 2}
    return open_text(
        DataConfig.model_validate(
            {"source": str(source), "max_bytes": 1000, "streaming": streaming, **data}
        )
    )


def texts(text: StreamedText) -> list[str]:
    return list(text.texts(text.dataset))


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def test_text_jsonl_and_parquet_are_read_document_by_document(tmp_path: Path) -> None:
    first, second, third, fourth = documents(4)
    (tmp_path / "a.txt").write_text(first, "utf-8")
    write_jsonl(tmp_path / "b.jsonl", [{"text": second}, {"text": "short"}])
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": third}).encode()))
    parquet.write_table(pa.table({"text": [fourth]}), tmp_path / "d.parquet")
    text = opened(tmp_path)
    assert text.shards == 4
    assert sorted(texts(text)) == sorted([first, second, "short", third, fourth])


def test_a_bad_row_costs_that_row_and_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\nbroken\n{"text": null}\n{"text": "two"}\n', "utf-8")
    with caplog.at_level(logging.WARNING, "shardwise"):
        for _epoch in range(2):
            assert texts(opened(tmp_path)) == ["one", "two"]
    assert caplog.messages == [f"{file}:2 is left out (not JSON), and so are rows like it."]


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist \(looked in"):
        opened(tmp_path / "nothing")
    write_jsonl(tmp_path / "a.jsonl", [{"body": "text"}])
    with pytest.raises(ConfigError, match=r"no field 'text'.*--data\.field body"):
        texts(opened(tmp_path))


def test_samples_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data" / "train.jsonl"
    path.parent.mkdir()
    path.write_text('{"prompt": "a", "completion": "b"}\n', "utf-8")
    samples: Any = {"format": "completion", "max_bytes": None, "validation_source": "held-out"}
    with pytest.raises(ConfigError, match=r"split 'test', cannot be read: its splits are train"):
        opened(path.parent, split="test", **samples)
    text = opened(path, **samples)
    path.write_text("{", "utf-8")
    with pytest.raises(ConfigError, match=r"train\.jsonl:1: Expecting property name"):
        list(text.rows(text.dataset))


def test_the_fingerprint_is_that_of_names_and_sizes(tmp_path: Path) -> None:
    first, moved = text_folder(tmp_path / "a", 5), text_folder(tmp_path / "b", 5)
    assert opened(first).fingerprint == opened(moved).fingerprint
    (moved / "001.txt").write_text("longer or shorter", "utf-8")
    assert opened(first).fingerprint != opened(moved).fingerprint


def test_the_head_is_read_to_its_limit_and_split_as_a_whole_corpus_is(tmp_path: Path) -> None:
    text = opened(text_folder(tmp_path), max_bytes=10**6, validation=0.2)
    head = text.read_head()
    assert sorted(head.documents) == sorted(documents())
    assert not head.capped
    assert text.split(head) == split(head, 0.2)
    less = opened(tmp_path, max_bytes=1000).read_head()
    assert less.capped
    assert 1000 <= less.nbytes < 1000 + max(map(len, documents()))
    assert less.documents == head.documents[: len(less.documents)]


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("hf://datasets/allenai/c4/en", ("allenai/c4", "en")),
        ("hf://datasets/owner/name", ("owner/name",)),
    ],
)
def test_a_data_set_of_the_hub_is_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, arguments: tuple[str, ...]
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "one", "url": "x"}, {"text": "two", "url": "y"}])
    load = datasets.load_dataset

    def hub(path: str, *, split: str, streaming: bool, **rest: str) -> datasets.IterableDataset:
        assert ((path, *rest.values()), split, streaming) == (arguments, "train", True)
        return load("json", data_files=str(tmp_path / "a.jsonl"), split="train", streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", hub)
    assert texts(opened(source)) == ["one", "two"]
    with pytest.raises(ConfigError, match=r"no text in the field 'body'. Its fields: text \(str\)"):
        texts(opened(source, field="body"))


@pytest.mark.parametrize("source", ["hf://datasets/owner/nothing", "hf://datasets/c4"])
def test_a_data_set_that_cannot_be_opened_is_an_error_with_its_form(source: str) -> None:
    form = "It must be hf://datasets/OWNER/NAME or hf://datasets/OWNER/NAME/CONFIG"
    with pytest.raises(ConfigError, match=f"data.source {source} cannot be opened: .*{form}"):
        opened(source)
