"""A recipe's ``model.from``: weights, tokenizer and configuration come from a folder.

The run's folder gets the folder's tokenizer, chat template and generation config unchanged, and its
configuration with the dtype of what was trained: so whatever loads the one loads the other.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch

from shardwise.checkpoint.reader import CheckpointReader
from shardwise.checkpoint.safetensors_format import dtype_of as stored_dtype
from shardwise.comm.protocol import Comm
from shardwise.convert.export import CONFIG, FROM_A_RUN, with_dtype
from shardwise.errors import ConfigError
from shardwise.sharded import Sharded
from shardwise.train.config import Recipe
from shardwise.train.model_config import TokenizerConfig
from shardwise.train.optimizer import blocksize_of
from shardwise.train.shard_arguments import shard_arguments

__all__ = ["dtype_of", "files", "load", "locate", "numel", "with_tokenizer"]


def locate(recipe: Recipe) -> Path:
    """The folder that ``model.from`` names. Raises ``ConfigError`` if it cannot be had."""
    from shardwise.hf.folder import locate

    return locate(recipe.model.source or "", recipe.model.revision)


def with_tokenizer(recipe: Recipe) -> Recipe:
    """The recipe with the folder's tokenizer and end token, as far as it names none itself.

    Raises:
        ConfigError: the folder has no tokenizer, or that no end token.
    """
    if recipe.model.source is None:
        return recipe
    from shardwise.hf.folder import tokenizer_of

    folder, given = locate(recipe), recipe.tokenizer
    tokenizer = None if given.source else tokenizer_of(folder)
    if not given.source and tokenizer is None:
        raise ConfigError(f"{folder} holds no tokenizer; name one in tokenizer.source.")
    end = None if tokenizer is None else tokenizer.eos_token
    if end is None or given.end != TokenizerConfig().end:
        end = given.end
    known = given.model_copy(update={"source": given.source or str(folder), "end": end})
    return recipe.model_copy(update={"tokenizer": known})


def load(recipe: Recipe, comm: Comm, vocabulary: int) -> tuple[Sharded, str]:
    """See ``language_model.build``; and what was read, and what an adapter's targets match."""
    from shardwise import hf

    config = recipe.model
    if comm.rank == 0:
        torch.manual_seed(recipe.run.seed)  # an adapter's values depend on nothing else
    loaded = hf.load(
        config.source or "",
        revision=config.revision,
        dtype=dtype_of(recipe),
        lora=recipe.adapter.config(),
        new_tokens=recipe.adapter.new_tokens,
        quantization=config.quantization.config(),
        comm=comm,
        blocksize=blocksize_of(recipe.optimizer),
        **shard_arguments(recipe.sharding),
    )
    text = loaded.model.config.get_text_config()
    if vocabulary > text.vocab_size:
        raise ConfigError(
            f"the tokenizer has {vocabulary:,} token ids, and the model in {config.source} "
            f"{text.vocab_size:,}; leave tokenizer.source out, and its own is used."
        )
    longest = getattr(text, "max_position_embeddings", None) or recipe.data.context
    if recipe.data.context > longest:
        raise ConfigError(
            f"data.context is {recipe.data.context:,}, and the model in {config.source} takes rows "
            f"of {longest:,} tokens at most; set data.context {longest}, or less."
        )
    return loaded.sharded, str(loaded)


def numel(recipe: Recipe) -> int:
    """Elements of all tensors in the folder."""
    with CheckpointReader.open(locate(recipe)) as reader:
        return sum(prod(place.stored.shape) for place in reader.weights().values())


def dtype_of(recipe: Recipe) -> torch.dtype:
    """The dtype in which the folder's weights are read."""
    from shardwise.hf.folder import config_of

    if recipe.model.dtype is not None:
        named: torch.dtype = getattr(torch, recipe.model.dtype)
        return named
    folder = locate(recipe)
    configured: torch.dtype | None = config_of(folder).dtype
    if configured is not None:
        return configured
    with CheckpointReader.open(folder) as reader:  # older folders say it in their files alone
        return stored_dtype(next(iter(reader.weights().values())).stored.dtype)


def files(recipe: Recipe, dtype: torch.dtype) -> dict[str, bytes]:
    """What belongs beside the trained weights, which are of ``dtype``, by name."""
    folder = locate(recipe)
    contents = {n: (folder / n).read_bytes() for n in FROM_A_RUN if (folder / n).is_file()}
    return contents | {CONFIG: with_dtype(contents[CONFIG], dtype)}
