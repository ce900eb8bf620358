from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from shardwise.cli import main, show_data
from shardwise.cli.show_data import Token, row_tokens
from shardwise.train.batches import Rows
from shardwise.train.packed import SampleRows
from tests.hf.folders import tiny_tokenizer
from tests.train.test_packed import examples
from tests.train.tiny import recipe_file

CHAT = {
    "messages": [
        {"role": "user", "content": "name it"},
        {"role": "assistant", "content": "def self"},
    ]
}


def show(recipe: Path, *arguments: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["data", "show", str(recipe), *arguments])
    assert caught.value.code == 0


def chat_recipe(folder: Path) -> tuple[Path, list[str]]:
    """A recipe with the tokenizer of a folder and its chat template."""
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    source = folder / "chats.jsonl"
    source.write_text("\n".join([json.dumps(CHAT)] * 5), "utf-8")
    values = {
        "tokenizer.source": folder / "tokenizer",
        "tokenizer.end": "<|im_end|>",
        "data.format": "messages",
        "data.source": source,
        "data.context": 64,
    }
    return recipe_file(folder), [f"{key}={value}" for key, value in values.items()]


@pytest.mark.prove
def test_the_rows_of_a_rehearsal_need_no_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the model, 70 billion parameters on the hub, nor its data set is here."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit) as caught:
        main(["data", "show", "llama2-70b-lora", "0", "--rehearse", "--run.folder", str(tmp_path)])
    out = capsys.readouterr().out
    assert caught.value.code == 0, out
    assert "row 0 of " in out
    assert "that of Stanford Alpaca" in out
    assert not (tmp_path.parent / f"{tmp_path.name}-rehearsal").exists()


def test_a_chat_token_by_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, overrides = chat_recipe(tmp_path)
    show(recipe, "0", *overrides)
    out = capsys.readouterr().out
    expected = "the chat template of the tokenizer; end token <|im_end|>; loss on assistant"
    assert expected in out
    text = "<|im_start|>user\nname it<|im_end|><|im_start|>assistant\n⟦def self<|im_end|>⟧"
    assert out.count(text) >= 2  # several samples in the row
    assert "row 0 of 2: " in out
    lines = [line.split() for line in out.splitlines()]
    ends = [line for line in lines if line[:1] == ["'<|im_end|>'"]]
    assert [line[-2:] for line in ends[:2]] == [["298", "end"], ["trained", "end"]]
    starts = [line for line in lines if line[:1] == ["'<|im_start|>'"]]
    first, second = starts[0], starts[2]
    assert first[1:5] == ["0", "0", "0", "299"]  # place, segment, position, id
    assert second[2:4] == ["1", "0"]


def test_what_is_trained_on_is_green_in_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminal(**options: bool) -> Console:
        return Console(force_terminal=True, color_system="standard", **options)  # type: ignore[arg-type]

    monkeypatch.setattr(show_data, "Console", terminal)
    recipe, overrides = chat_recipe(tmp_path)
    show(recipe, "1", *overrides)
    assert "\x1b[32m⟦def self<|im_end|>⟧\x1b[0m" in capsys.readouterr().out


def test_text_is_trained_on_but_for_the_first_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(recipe_file(tmp_path), "3")
    out = capsys.readouterr().out
    assert "16 tokens, 16 trained on (⟦…⟧ and the first token of the next row)" in out
    assert "documents one after the other; end token <|endoftext|>; loss on all" in out


def test_a_rehearsal_that_is_only_shown_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_file(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    show(recipe, "0", "--rehearse")
    assert "row 0 of " in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


def test_the_places_of_a_row_without_its_padding() -> None:
    rows = SampleRows(examples(("ab", "c"), ("d", "e")), context=9)
    assert row_tokens(rows, 0) == [
        Token(0, 0, 0, 0, trained=False),
        Token(1, 0, 1, 1, trained=False),
        Token(2, 0, 2, 2, trained=True),
        Token(3, 1, 0, 3, trained=False),
        Token(4, 1, 1, 4, trained=True),
    ]
    alone = row_tokens(SampleRows(rows.examples, 9, packed=False), 1)
    assert alone == [Token(0, 0, 0, 3, trained=False), Token(1, 0, 1, 4, trained=True)]
    stream = Rows(np.arange(5, dtype=np.int32), 2, np.array([True] * 4 + [False]))
    assert [token.trained for token in row_tokens(stream, 1)] == [False, True]


@pytest.mark.parametrize(
    ("number", "options", "message"),
    [
        ("9999", (), "there is no row 9999; the training split has 0 to "),
        ("0", ("data.streaming.streams=4", "data.max_bytes=9000"), "leave data.streaming out"),
    ],
)
def test_rows_that_are_not_there(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    number: str,
    options: tuple[str, ...],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["data", "show", str(recipe_file(tmp_path)), number, *options])
    assert caught.value.code == 1
    assert message in capsys.readouterr().err
