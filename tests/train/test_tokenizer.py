from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardwise.errors import ConfigError
from shardwise.recipe.model_config import TokenizerConfig
from shardwise.train import tokenizer as bpe
from shardwise.train.folder import Folder
from tests.train.tiny import documents

TRAINED = "trained on the training split"


def test_the_same_text_gives_the_same_tokenizer() -> None:
    assert bpe.train(documents(), 300) == bpe.train(documents(), 300)


def test_the_vocabulary_is_what_was_asked_for() -> None:
    assert bpe.load(bpe.train(documents(), 290)).get_vocab_size() == 290


@pytest.mark.parametrize("text", ["def f(x):\n\treturn x", " ümläut 漢字 🦙", "", "<|endoftext|>"])
def test_every_text_decodes_to_itself(text: str) -> None:
    tokenizer = bpe.load(bpe.train(documents(), 300))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert bpe.end_id(tokenizer) not in ids


def test_documents_are_one_stream_with_an_end_after_each() -> None:
    tokenizer = bpe.load(bpe.train(documents(), 300))
    stream = bpe.encode(tokenizer, documents(200))
    end = bpe.end_id(tokenizer)
    assert stream.dtype == np.int32
    ends = np.flatnonzero(stream == end)
    assert len(ends) == 200
    assert ends[-1] == len(stream) - 1
    first = stream[: ends[0]].tolist()
    assert tokenizer.decode(first) == documents(200)[0]


def test_no_documents_are_an_empty_stream() -> None:
    assert len(bpe.encode(bpe.load(bpe.train(documents(), 300)), [])) == 0


def obtained(folder: Folder, texts: list[str], size: int) -> bpe.TrainedTokenizer:
    return bpe.load_or_train(folder, texts, TokenizerConfig(vocabulary=size))


def keep(folder: Folder, tokenizer: bpe.TrainedTokenizer) -> None:
    for name, text in tokenizer.files.items():
        folder.write_text(name, text)


def test_a_tokenizer_is_used_again_for_the_same_text_and_size(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    first = obtained(folder, documents(), 300)
    assert list(tmp_path.iterdir()) == []
    keep(folder, first)
    again = obtained(folder, documents(), 300)
    assert (first.text, first.files) == (again.text, again.files)
    assert first.origin == TRAINED
    assert again.origin == "from the last run"
    assert (tmp_path / "tokenizer.json").read_text("utf-8") == first.text


def test_other_text_or_size_or_a_changed_file_means_a_new_tokenizer(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    keep(folder, obtained(folder, documents(), 300))
    assert obtained(folder, documents(), 301).origin == TRAINED
    assert obtained(folder, documents(50), 300).origin == TRAINED
    (tmp_path / "tokenizer.json").write_text("{}", "utf-8")
    assert obtained(folder, documents(), 300).origin == TRAINED


def test_a_tokenizer_without_an_end_token_is_refused() -> None:
    text = bpe.train(documents(), 300).replace(bpe.END, "<other>")
    with pytest.raises(ConfigError, match=r"no <\|endoftext\|> token; .*: <other>"):
        bpe.end_id(bpe.load(text))


def test_a_tokenizer_of_ones_own_is_read_from_its_folder_with_its_own_end(tmp_path: Path) -> None:
    text = bpe.train(documents(), 300).replace(bpe.END, "</s>")
    text = text.replace(
        '"truncation": null',
        '"truncation": {"direction": "Right", "max_length": 2,'
        ' "strategy": "LongestFirst", "stride": 0}',
    )
    (tmp_path / "tokenizer.json").write_text(text, "utf-8")
    for source in (tmp_path, tmp_path / "tokenizer.json"):
        config = TokenizerConfig(source=str(source), end="</s>")
        own = bpe.load_or_train(Folder(tmp_path / "run"), [], config)
        assert (own.text, own.files) == (text, {"tokenizer.json": text})
        assert own.origin == f"read from {source}"
    tokenizer = bpe.load(own.text)
    stream = bpe.encode(tokenizer, documents(2), "</s>").tolist()
    assert tokenizer.decode(stream, skip_special_tokens=False) == "".join(
        document + "</s>" for document in documents(2)
    )


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", "utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        bpe.load_or_train(folder, [], TokenizerConfig(source=str(tmp_path)))
    (tmp_path / "tokenizer.json").write_text(bpe.train(documents(), 300), "utf-8")
    with pytest.raises(ConfigError, match=r"no </s> token; its special tokens are: <\|endoftext"):
        bpe.load_or_train(folder, [], TokenizerConfig(source=str(tmp_path), end="</s>"))
