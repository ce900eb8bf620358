from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from shardwise.errors import ConfigError
from shardwise.train.config import DataConfig
from shardwise.train.corpus import Corpus, read_corpus, split
from tests.train.tiny import documents, text_folder


def read(source: Path | str, **more: object) -> Corpus:
    return read_corpus(DataConfig.model_validate({"source": str(source), **more}))


def corpus(texts: list[str]) -> Corpus:
    return Corpus("here", tuple(texts), sum(len(text.encode()) for text in texts), len(texts))


# --- reading ---------------------------------------------------------------------------------


def test_the_default_is_the_standard_library_without_its_tests() -> None:
    found = read("stdlib", max_bytes=200_000)
    assert found.name == "Python's standard library"
    assert found.nbytes == 200_000
    assert found.capped
    assert any("def " in text for text in found.documents)


def test_reading_twice_gives_the_same_documents_in_the_same_order(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "text")
    assert read(folder) == read(folder)


def test_each_text_file_is_a_document(tmp_path: Path) -> None:
    found = read(text_folder(tmp_path / "text", count=5))
    assert sorted(found.documents) == sorted(documents(5))
    assert (found.files, found.skipped, found.capped) == (5, 0, False)


def test_one_file_is_a_corpus_too(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("to be or not to be", "utf-8")
    assert read(tmp_path / "input.txt").documents == ("to be or not to be",)


def test_a_limit_takes_a_sample_of_all_files_and_cuts_the_last(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "text", count=40)
    found = read(folder, max_bytes=2_001)
    assert found.capped
    assert found.nbytes == 2_001
    whole = read(folder).documents
    assert found.documents[:-1] == whole[: len(found.documents) - 1]
    assert whole[len(found.documents) - 1].startswith(found.documents[-1])
    assert list(found.documents) != sorted(documents(40))[: len(found.documents)]


def test_what_is_not_text_is_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text", "utf-8")
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / ".hidden").write_text("secret", "utf-8")
    found = read(tmp_path)
    assert found.documents == ("text",)
    assert (found.files, found.skipped) == (2, 1)


def test_jsonl_gives_one_document_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n\n{"body": "two", "n": 2}\n', "utf-8")
    assert read(tmp_path, field="body").documents == ("one", "two")


def test_parquet_gives_one_document_a_row(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"body": ["one", "two"], "n": [1, 2]}), tmp_path / "a.parquet")
    assert read(tmp_path, field="body").documents == ("one", "two")


# --- what cannot be read ---------------------------------------------------------------------


def message(source: Path | str, **more: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read(source, **more)
    return str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert "does not exist" in message(tmp_path / "nowhere")
    assert "or 'stdlib' for Python's own source" in message(tmp_path / "nowhere")


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    assert "is a folder without files" in message(tmp_path)


def test_a_folder_without_text_says_what_was_opened(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\xff\xff")
    assert "1 files were opened, 1 of them are not UTF-8 text" in message(tmp_path)


def test_a_missing_json_field_names_line_fields_and_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1, "txet": "a"}\n', "utf-8")
    assert message(tmp_path) == (
        f"{path}:1: there is no field 'text'. Fields there: id, txet. "
        "Nearest is 'txet'; choose it with --data.field txet."
    )


def test_a_missing_parquet_column_names_the_columns(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"id": [1], "body": ["a"]}), tmp_path / "a.parquet")
    assert "there is no field 'text'. Fields there: id, body." in message(tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{oops", ":2: this line is not JSON"),
        ("[1]", ":2: expected a JSON object with a field 'text'"),
        ('{"text": 3}', ":2: 'text' holds int, not text"),
    ],
)
def test_a_wrong_line_of_jsonl_is_named(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}) + "\n" + line + "\n", "utf-8")
    assert said in message(tmp_path)


def test_a_file_that_only_claims_to_be_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"no")
    assert "is not a parquet file" in message(tmp_path)


# --- the split -------------------------------------------------------------------------------


def test_the_splits_are_disjoint_and_complete() -> None:
    texts = documents(200)
    parts = split(corpus(texts), 0.1)
    assert set(parts.training).isdisjoint(parts.validation)
    assert sorted(parts.training + parts.validation) == sorted(texts)
    assert 8 <= len(parts.validation) <= 36  # a tenth, by chance


def test_copies_of_a_text_are_on_one_side() -> None:
    parts = split(corpus(documents(100) * 3), 0.1)
    assert set(parts.training).isdisjoint(parts.validation)


def test_a_document_stays_on_its_side_when_others_come() -> None:
    few, many = split(corpus(documents(100)), 0.1), split(corpus(documents(200)), 0.1)
    assert set(few.validation) <= set(many.validation)


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
def test_neither_side_is_ever_empty(share: float) -> None:
    parts = split(corpus(documents(60)), share)
    assert min(len(parts.training), len(parts.validation)) == 1


def test_one_big_file_is_cut_at_line_ends() -> None:
    text = "".join(f"line {i} of one long text\n" for i in range(5_000))
    parts = split(corpus([text]), 0.1)
    pieces = [*parts.training, *parts.validation]
    assert len(parts.validation) >= 5
    assert all(piece.endswith("\n") for piece in pieces)
    assert sum(map(len, pieces)) == len(text)


def test_a_single_line_cannot_be_divided() -> None:
    with pytest.raises(ConfigError, match="1 piece of text"):
        split(corpus(["one line"]), 0.5)


def test_the_digest_follows_the_text() -> None:
    assert corpus(["a", "b"]).digest == corpus(["a", "b"]).digest
    assert len({corpus(t).digest for t in (["a", "b"], ["b", "a"], ["ab"])}) == 3
