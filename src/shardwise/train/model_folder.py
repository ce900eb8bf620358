"""A recipe's ``model.from``: weights, tokenizer and configuration come from a folder.

The run's folder gets the folder's tokenizer, chat template and generation config unchanged, and its
configuration with the dtype of what was trained: so whatever loads the one loads the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.api.sharded import Sharded
from shardwise.comm.protocol import Comm
from shardwise.convert.export import CONFIG, FROM_A_RUN, with_dtype
from shardwise.errors import ConfigError
from shardwise.recipe.model_config import ModelConfig, TokenizerConfig
from shardwise.recipe.recipe import Recipe
from shardwise.recipe.shard_arguments import shard_arguments
from shardwise.train.optimizer import blocksize_of

if TYPE_CHECKING:
    from shardwise.hf import Changes


def locate(recipe: Recipe) -> Path:
    """The folder that ``model.from`` names. Raises ``ConfigError`` if it cannot be had."""
    from shardwise.hf.folder import locate

    return locate(recipe.model.source or "", recipe.model.revision)


def with_tokenizer(recipe: Recipe) -> Recipe:
    """The recipe with the folder's tokenizer and end token, as far as it names none itself.

    Raises:
        ConfigError: the folder has no tokenizer, or that no end token; or its model takes shorter
            rows than data.context.
    """
    if recipe.model.source is None:
        return recipe
    from shardwise.hf.folder import config_of, tokenizer_of

    folder, config = locate(recipe), recipe.tokenizer
    check_context(recipe, config_of(folder))
    tokenizer = None if config.source else tokenizer_of(folder)
    if not config.source and tokenizer is None:
        raise ConfigError(f"{folder} holds no tokenizer; name one in tokenizer.source.")
    end = None if tokenizer is None else tokenizer.eos_token
    if end is None or config.end != TokenizerConfig().end:
        end = config.end
    resolved = config.model_copy(update={"source": config.source or str(folder), "end": end})
    return recipe.model_copy(update={"tokenizer": resolved})


def check_context(recipe: Recipe, config: Any) -> None:
    """Raise ``ConfigError`` if a model of ``config`` takes shorter rows than data.context."""
    longest = longest_row(config) or recipe.data.context
    if recipe.data.context > longest:
        raise ConfigError(
            f"data.context is {recipe.data.context:,}, and the model in {recipe.model.source} "
            f"takes rows of {longest:,} tokens at most; set data.context {longest}, or less."
        )


def longest_row(config: Any) -> int | None:
    """Tokens of the longest row that a model of ``config`` takes; ``None``: any, or none said."""
    longest: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return longest if longest is not None and longest > 0 else None  # XLNet's is -1


def load(recipe: Recipe, comm: Comm, vocabulary: int) -> tuple[Sharded, str]:
    """See ``language_model.build``; and what was read, and what an adapter's targets match."""
    from shardwise import hf

    config, changes = recipe.model, _changes(recipe)
    if comm.rank == 0:
        torch.manual_seed(recipe.run.seed)  # an adapter's values depend on nothing else
    loaded = hf.load(
        config.source or "",
        revision=config.revision,
        dtype=_dtype(config),
        **changes._asdict(),
        comm=comm,
        blocksize=blocksize_of(recipe.optimizer.name),
        **shard_arguments(recipe.sharding),
    )
    text = loaded.model.config.get_text_config()
    if vocabulary > text.vocab_size:
        raise ConfigError(
            f"the tokenizer has {vocabulary:,} token ids, and the model in {config.source} "
            f"{text.vocab_size:,}; leave tokenizer.source out, and its own is used."
        )
    return loaded.sharded, str(loaded)


def on_meta(recipe: Recipe) -> nn.Module:
    """The same model on the meta device, from its config alone."""
    from shardwise import hf

    config = recipe.model
    model: nn.Module = hf.on_meta(
        config.source or "", config.revision, _dtype(config), _changes(recipe)
    )
    return model


def _changes(recipe: Recipe) -> Changes:
    from shardwise.hf import Changes

    quantization, adapter = recipe.model.quantization.config(), recipe.adapter
    return Changes(quantization, adapter.config(), adapter.new_tokens)


def _dtype(config: ModelConfig) -> torch.dtype | None:
    return None if config.dtype is None else getattr(torch, config.dtype)


def files(recipe: Recipe, dtype: torch.dtype) -> dict[str, bytes]:
    """Return the files beside the trained weights, which are of ``dtype``, by name."""
    folder = locate(recipe)
    contents = {n: (folder / n).read_bytes() for n in FROM_A_RUN if (folder / n).is_file()}
    return contents | {CONFIG: with_dtype(contents[CONFIG], dtype)}
