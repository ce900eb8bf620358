from __future__ import annotations

import pytest

from shardwise.recipe.errors import known_keys
from shardwise.recipe.key_suggestions import SYNONYMS, suggestions

OPTIONS = ["--nproc", "--restarts", "--kill-rank"]


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("hidden_size", "model.width"),
        ("model.hidden_size", "model.width"),
        ("learning_rate", "optimizer.lr"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("seq_len", "data.context"),
        ("max_seq_len", "data.context"),
        ("vocab_size", "tokenizer.vocabulary"),
        ("max_steps", "run.steps"),
        ("num_train_epochs", "run.epochs"),
        ("output_dir", "run.folder"),
        ("batch_size", "batch.rows"),
        ("per-device-train-batch-size", "batch.micro"),
        ("gradient_checkpointing", "sharding.activation_checkpointing"),
        ("mixed_precision", "sharding.precision"),
        ("resume_from_checkpoint", "checkpoint.resume"),
        ("nproc_per_node", "--nproc"),
        ("n", "--nproc"),
    ],
)
def test_the_field_s_words_are_understood(word: str, key: str) -> None:
    assert suggestions(word, [*known_keys(), *OPTIONS])[0] == key


def test_every_synonym_leads_to_something_that_exists() -> None:
    names = {*known_keys(), *OPTIONS}
    assert [word for word, keys in SYNONYMS.items() if not set(keys) <= names] == []


def test_a_word_of_the_field_that_is_a_key_here_too_is_both() -> None:
    assert suggestions("output", known_keys()) == ["run.folder", "sharding.precision.output_dtype"]


def test_a_misspelt_key_is_found_by_its_letters_in_its_section_first() -> None:
    assert suggestions("model.hedas", known_keys()) == ["model.heads"]
    assert suggestions("modle.width", known_keys()) == ["model.width"]
    assert suggestions("optimiser", known_keys()) == ["optimizer"]


def test_a_name_that_exists_in_several_sections_is_all_of_them() -> None:
    assert suggestions("tokens", known_keys()) == ["sample.tokens"]
    assert suggestions("forward", known_keys()) == ["sharding.prefetch.forward"]


def test_what_is_like_nothing_is_answered_with_nothing() -> None:
    assert suggestions("zorp", known_keys()) == []
