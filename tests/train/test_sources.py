from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from shardwise.errors import ConfigError
from shardwise.train.sources import read_rows

ROWS: list[dict[str, Any]] = [{"prompt": f"{i}", "completion": "é"} for i in range(5)]


def jsonl(path: Path, text: str = "\n".join(map(json.dumps, ROWS))) -> Path:
    path.write_text(text, "utf-8")
    return path


def packed(path: Path) -> Path:
    path.write_bytes(gzip.compress(jsonl(path.with_suffix("")).read_bytes()))
    return path


def arrow(path: Path) -> Path:
    datasets.Dataset.from_list(ROWS).save_to_disk(path)
    return path


def dictionary(path: Path) -> Path:
    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(path)
    return path


def parquet(path: Path) -> Path:
    datasets.Dataset.from_list(ROWS).to_parquet(path)
    return path


def folder(path: Path) -> Path:
    path.mkdir()
    jsonl(path / "train.jsonl")
    jsonl(path / "test.jsonl", json.dumps(ROWS[0]))
    return path


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("a.jsonl", jsonl),
        ("a.json", lambda path: jsonl(path, json.dumps(ROWS))),
        ("a.jsonl.gz", packed),
        ("a.parquet", parquet),
        ("arrow", arrow),
        ("dict", dictionary),
        ("folder", folder),
    ],
)
def test_rows_are_read_in_order(tmp_path: Path, name: str, written: Callable[[Path], Path]) -> None:
    assert read_rows(str(written(tmp_path / name)), "train") == ROWS


@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
def test_columns_of_csv_are_text_as_they_stand(tmp_path: Path, suffix: str) -> None:
    path, text = tmp_path / f"a.{suffix}", "\ufeffprompt,completion\n1+1,2\nname,NA\nid,007\n"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    assert [row["completion"] for row in read_rows(str(path), "train")] == ["2", "NA", "007"]
    assert list(read_rows(str(path), "train")[0]) == ["prompt", "completion"]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_text_stays_as_it_stands_whatever_other_files_hold(tmp_path: Path, suffix: str) -> None:
    """pyarrow takes a column of dates for times, and pandas NA for nothing."""
    columns = ["word", "x"], ["2020-01-14T10:00:00"] * 2, ["NA", "007"]
    for number, texts in enumerate(columns):
        rows = [{"completion": text} for text in texts]
        lines = "\n".join(["completion", *texts, ""] if suffix == "csv" else map(json.dumps, rows))
        text = json.dumps(rows, indent=1) if suffix == "json" else lines
        jsonl(tmp_path / f"train-{number}.{suffix}", text)
    read = [row["completion"] for row in read_rows(str(tmp_path), "train")]
    assert read == [text for texts in columns for text in texts]


def test_files_without_rows_are_read_as_that(tmp_path: Path) -> None:
    jsonl(tmp_path / "train-0.jsonl", "")
    assert read_rows(str(tmp_path), "train") == []
    jsonl(tmp_path / "train-1.jsonl")
    assert read_rows(str(tmp_path), "train") == ROWS


def test_another_split_of_a_folder(tmp_path: Path) -> None:
    assert read_rows(str(folder(tmp_path / "data")), "test") == ROWS[:1]


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ("", {}),
        ("/20220301.en", {"name": "20220301.en"}),
        ("/data/a.jsonl.gz", {"data_files": "data/a.jsonl.gz"}),
    ],
)
def test_a_data_set_of_the_hub_or_its_configuration_or_a_file_of_it(
    monkeypatch: pytest.MonkeyPatch, inside: str, arguments: dict[str, str]
) -> None:
    def load(path: str, *, split: str, streaming: bool, **rest: str) -> datasets.Dataset:
        assert (path, split, streaming, rest) == ("tatsu-lab/alpaca", "test", False, arguments)
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read_rows(f"hf://datasets/tatsu-lab/alpaca{inside}", "test") == ROWS


def test_the_hub_that_cannot_be_reached() -> None:
    with pytest.raises(ConfigError, match=r"cannot be opened: .* Without a network, download it"):
        read_rows("hf://datasets/tatsu-lab/alpaca", "train")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("tatsu-lab/alpaca", "does not exist .* hub is hf://datasets/tatsu-lab/alpaca."),
        ("bad.jsonl", r"bad.jsonl:2: Expecting value: line 1 column 6 .char 5.. Repair it"),
        ("text.txt", "is no file of samples: its name must end in .jsonl.* data.format text"),
        ("folder", "split 'train', cannot be read: its splits are test. Repair it"),
        ("list.json", r"list.json:2: a row is int, not a JSON object. Repair it"),
        ("lists.jsonl", r"lists.jsonl:1: Extra data: line 1 column 4"),
        ("types", r"cannot be read: Couldn't cast array of type int64 to null Repair"),
        ("cut.jsonl.gz", r"cannot be read: Compressed file ended before .* Repair"),
        ("latin", r"train-0.jsonl:1: 'utf-8' codec can't decode byte 0xe9"),
    ],
)
def test_what_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "bad.jsonl", '{"a": 1}\n{"a":\n{"a": 2}')
    jsonl(tmp_path / "text.txt")
    (tmp_path / "folder").mkdir()
    jsonl(tmp_path / "folder" / "test.jsonl")
    jsonl(tmp_path / "list.json", '[{"a": 1}, 2]')
    jsonl(tmp_path / "lists.jsonl", "[1]\n[2]")
    (tmp_path / "latin").mkdir()
    (tmp_path / "latin" / "train-0.jsonl").write_bytes(b'{"a": "\xe9"}')
    cut = packed(tmp_path / "cut.jsonl.gz")
    cut.write_bytes(cut.read_bytes()[:-9])
    (tmp_path / "types").mkdir()
    for number, values in enumerate(([None], [1])):
        datasets.Dataset.from_dict({"a": values}).to_parquet(
            tmp_path / "types" / f"train-{number}.parquet"
        )
    with pytest.raises(ConfigError, match=message):
        read_rows(source, "train")
