"""Tokens that a model's vocabulary lacks: given to the tokenizer, with embeddings that are trained.

Only their rows are trained, by peft's ``trainable_token_indices``; the frozen rows are as in the
files, and the adapter's folder holds the new ones alone.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.hf.targets import match_targets

if TYPE_CHECKING:
    from peft import LoraConfig

T = TypeVar("T")


def add_tokens(
    model: Any, tokenizer: Any, tokens: Sequence[str], places: MutableMapping[Tensor, T]
) -> dict[str, list[int]]:
    """Give ``tokenizer`` the tokens, and the model, which is on the meta device, rows for them.

    Args:
        places: where tensors of the model are stored, which follow the tables that grow.

    Returns:
        ``trainable_token_indices``: the last name of each embedding table → the tokens' ids.

    Raises:
        ConfigError: there is no tokenizer, or it has one of the tokens, or one is empty.
    """
    tokens = list(dict.fromkeys(tokens))  # each has one row
    known = set(tokens) & {"", *(tokenizer.get_vocab() if tokenizer is not None else tokens)}
    if known:
        missing = "there is no tokenizer to add them to" if tokenizer is None else "it has it"
        missing = missing if min(known) else "it is empty"
        raise ConfigError(
            f"new token {min(known)!r} cannot be added to the tokenizer: {missing}. Name tokens "
            "that are new, and a folder with a tokenizer."
        )
    tokenizer.add_tokens(tokens)
    before = _tables(model)
    if len(tokenizer) > before[0].weight.shape[0]:
        with torch.device("meta"):
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        for old, new in zip(before, _tables(model), strict=True):
            if old.weight in places:
                places[new.weight] = places.pop(old.weight)
    ids, tables = tokenizer.convert_tokens_to_ids(tokens), _tables(model)
    if tables[0].weight is tables[1].weight:  # peft follows the tie
        tables = tables[:1]
    return {name.rpartition(".")[2]: ids for name in _names(model, tables)}


def check_tables(model: Any, lora: LoraConfig, tokens: Sequence[str]) -> None:
    """Raise ``ConfigError`` if ``lora`` trains a table that is to get rows of new tokens."""
    tables = _names(model, _tables(model))
    for row in match_targets(lora, model).rows:
        key = "modules_to_save" if row.trained_whole else "target_modules"
        for table in sorted({*tables} & {*row.paths}):
            raise ConfigError(
                f"new_tokens ({', '.join(tokens)}) train their own rows of the embedding and the "
                f"head, and {row.target!r} of {key} is {table}, which peft cannot train in two "
                f"ways, nor apart from what is tied to it. Leave {row.target!r} out of {key}."
            )


def _tables(model: Any) -> list[Any]:
    """The embedding, and the head."""
    return [model.get_input_embeddings(), model.get_output_embeddings()]


def _names(model: Any, tables: Sequence[Any]) -> list[str]:
    return [name for name, module in model.named_modules() if module in tables]
