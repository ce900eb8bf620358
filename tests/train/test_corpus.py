from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.recipe.data_config import DataConfig
from shardwise.train.corpus import Corpus, read_corpus, split
from tests.train.tiny import documents, text_folder


def read(source: Path | str, **more: object) -> Corpus:
    return read_corpus(DataConfig.model_validate({"source": str(source), **more}))


def corpus(texts: list[str]) -> Corpus:
    return Corpus("here", tuple(texts), sum(len(text.encode()) for text in texts), len(texts))


# --- reading ---------------------------------------------------------------------------------


def test_the_default_is_the_standard_library_without_its_tests() -> None:
    stdlib = read("stdlib", max_bytes=200_000)
    assert stdlib.name == "Python's standard library"
    assert stdlib.nbytes == 200_000
    assert stdlib.capped
    assert any("def " in text for text in stdlib.documents)


def test_reading_twice_gives_the_same_documents_in_the_same_order(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "text")
    assert read(folder) == read(folder)


def test_each_text_file_is_a_document(tmp_path: Path) -> None:
    texts = read(text_folder(tmp_path / "text", count=5))
    assert sorted(texts.documents) == sorted(documents(5))
    assert (texts.files, texts.left_out, texts.capped) == (5, (), False)


def test_one_file_is_a_corpus_too(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("to be or not to be", "utf-8")
    assert read(tmp_path / "input.txt").documents == ("to be or not to be",)


def test_a_limit_takes_a_sample_of_all_files_and_cuts_the_last(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "text", count=40)
    sample = read(folder, max_bytes=2_001)
    assert sample.capped
    assert sample.nbytes == 2_001
    whole = read(folder).documents
    assert sample.documents[:-1] == whole[: len(sample.documents) - 1]
    assert whole[len(sample.documents) - 1].startswith(sample.documents[-1])
    assert list(sample.documents) != sorted(documents(40))[: len(sample.documents)]


def test_a_limit_that_the_text_just_meets_leaves_nothing_out(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "text", count=5)
    size = read(folder).nbytes
    assert not read(folder, max_bytes=size).capped
    assert read(folder, max_bytes=size - 1).capped


def test_what_is_not_text_is_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text", "utf-8")
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / ".hidden").write_text("secret", "utf-8")
    texts = read(tmp_path)
    assert texts.documents == ("text",)
    assert texts.files == 2
    assert [*map(str, texts.left_out)] == [f"1 file, not text ({tmp_path / 'b.bin'})"]


def test_what_is_left_out_is_counted_and_named_by_its_first_three_places(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' + "oops\n" * 5, "utf-8")
    (left_out,) = read(path).left_out
    assert left_out.places == tuple(f"{path}:{line}" for line in (2, 3, 4))
    assert str(left_out) == f"5 rows, not JSON ({path}:2, …)"


def test_links_to_folders_are_followed_each_folder_once(tmp_path: Path) -> None:
    text_folder(tmp_path / "elsewhere", count=5)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "data")
    assert sorted(read(tmp_path / "data").documents) == sorted(documents(5))


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
    (tmp_path / "a.bin").write_bytes(b"\x00")
    assert message(tmp_path) == (
        f"data.source {str(tmp_path)!r} holds no text; 1 file was opened. Left out: 1 file, not "
        f"text ({tmp_path / 'a.bin'}). Name a file or a folder of text, JSONL or parquet."
    )


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(tmp_path / "nothing")
    assert message(tmp_path) == (
        f"data.source {str(tmp_path)!r}: {tmp_path / 'a.txt'} cannot be read (No such file or "
        "directory). Repair it, or name a source without it."
    )


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


def test_a_file_without_line_ends_is_cut_between_words() -> None:
    text = " ".join(f"word{i}" for i in range(20_000))
    parts = split(corpus([text]), 0.1)
    pieces = [*parts.training, *parts.validation]
    assert len(parts.validation) >= 2
    assert sorted(word for piece in pieces for word in piece.split()) == sorted(text.split())
    assert split(corpus([text]), 0.1) == parts


def test_a_file_without_words_is_cut_anywhere() -> None:
    parts = split(corpus(["漢字" * 5_000 + "。"]), 0.1)
    assert sum(map(len, parts.training + parts.validation)) == 10_001


def test_cutting_looks_at_each_character_about_once() -> None:
    looked = []

    class Text(str):
        __slots__ = ()

        def find(self, *where: Any) -> int:
            place = super().find(*where)
            looked.append((place + 1 or where[2]) - where[1])
            return place

    text = Text("".join(f"{i}\n" for i in range(50_000)))
    split(corpus([text]), 0.1)
    assert sum(looked) < len(text)


def test_a_single_line_cannot_be_divided() -> None:
    with pytest.raises(ConfigError, match=r"here \(8 bytes\) is one line, .* cannot be split"):
        split(corpus(["one line"]), 0.5)
