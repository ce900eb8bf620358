from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from shardwise.comm.protocol import Comm
from shardwise.comm.transports import threads
from shardwise.comm.transports.local import LocalComm
from shardwise.errors import ConfigError
from shardwise.recipe.recipe import Recipe
from shardwise.train.batches import Rows
from shardwise.train.data import Data, prepare
from shardwise.train.folder import Folder
from shardwise.train.records import Prepared
from shardwise.train.tokenizer import Tokens
from tests.train.tiny import documents, tiny_recipe


def folder_of(recipe: Recipe) -> Folder:
    path = Path(recipe.run.folder)
    path.mkdir(parents=True, exist_ok=True)
    return Folder(path)


def tokens_of(data: Data) -> Tokens:
    """The tokens of the training split."""
    assert isinstance(data.training, Rows)
    return data.training.stream


def prepared(recipe: Recipe, world: int) -> list[Data]:
    folder = folder_of(recipe)

    def rank(comm: Comm) -> Data:
        return prepare(recipe, comm, folder if comm.rank == 0 else None)

    return threads.run(world, rank)


@pytest.mark.parametrize("world", [1, 3])
def test_every_rank_has_the_same_data_and_only_rank_0_reads(tmp_path: Path, world: int) -> None:
    first, *others = prepared(tiny_recipe(tmp_path), world)
    for other in others:
        assert other.tokenizer.to_str() == first.tokenizer.to_str()
        assert (tokens_of(other) == tokens_of(first)).all()
        assert (other.validation.arrays[0] == first.validation.arrays[0]).all()
        assert other.report is None
    assert first.report is not None


def test_every_document_is_in_one_of_the_streams(tmp_path: Path) -> None:
    (data,) = prepared(tiny_recipe(tmp_path), 1)
    streams = (tokens_of(data).tolist(), data.validation.arrays[0].tolist())
    texts = [
        text
        for stream in streams
        for text in data.tokenizer.decode(stream, skip_special_tokens=False).split("<|endoftext|>")
    ]
    assert sorted(filter(None, texts)) == sorted(documents())


def test_the_report_accounts_for_every_token(tmp_path: Path) -> None:
    (data,) = prepared(tiny_recipe(tmp_path), 1)
    report = data.report
    assert isinstance(report, Prepared)
    assert sum(report.documents) == report.files == 60
    for tokens, rows, dropped in zip(report.tokens, report.rows, report.dropped, strict=True):
        assert tokens == 1 + rows * 16 + dropped
    assert report.vocabulary == data.tokenizer.get_vocab_size() == 300


def test_a_second_run_finds_its_tokenizer(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    for origin in ("trained on the training split", "from the last run"):
        (data,) = prepared(recipe, 1)
        assert data.report is not None
        assert data.report.origin == origin
        for name, text in data.files.items():
            Folder(Path(recipe.run.folder)).write_text(name, text)


def test_each_part_that_may_take_long_is_named_before_it_is_done(tmp_path: Path) -> None:
    recipe, parts = tiny_recipe(tmp_path), list[str]()

    def busy(what: str) -> nullcontext[None]:
        parts.append(what)
        return nullcontext()

    prepare(recipe, LocalComm(), folder_of(recipe), busy)
    assert parts == ["reading text", "training the tokenizer", "tokenizing"]


def test_too_little_text_for_a_row_says_which_split(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "data.context=500", "data.validation=0.01")
    with pytest.raises(ConfigError, match=r"the validation split has \d+ tokens, fewer than"):
        prepare(recipe, LocalComm(), folder_of(recipe))


def test_the_fingerprint_is_that_of_the_tokens(tmp_path: Path) -> None:
    first, other = prepared(tiny_recipe(tmp_path / "a"), 2)
    (elsewhere,) = prepared(tiny_recipe(tmp_path / "b"), 1)
    (less,) = prepared(tiny_recipe(tmp_path / "c", "data.validation=0.3"), 1)
    assert first.fingerprint == other.fingerprint == elsewhere.fingerprint
    assert less.fingerprint != first.fingerprint
