"""The trainer's view of a model: to be built in shards, and for the logits of a batch.

Everything else in ``train`` takes any causal language model, of ours or of `transformers`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.api.shard import shard
from shardwise.api.sharded import Sharded
from shardwise.comm.protocol import Comm
from shardwise.recipe.recipe import Recipe
from shardwise.recipe.shard_arguments import shard_arguments
from shardwise.train import model_folder
from shardwise.train.batches import MicroBatch
from shardwise.train.decoder import Decoder, initialiser
from shardwise.train.optimizer import blocksize_of

__all__ = ["build", "logits"]


def build(recipe: Recipe, comm: Comm, vocabulary: int) -> tuple[Sharded, str]:
    """The sharded model of ``recipe``, for ``vocabulary`` token ids; and a report. A collective.

    Of a folder each rank reads what it holds. Else every rank draws the same weights from the seed,
    unit by unit, and keeps its shard.

    Raises:
        ConfigError: the folder's model has fewer token ids, or takes shorter rows.
    """
    if recipe.model.source is not None:
        return model_folder.load(recipe, comm, vocabulary)
    with torch.device("meta"):
        model = Decoder(recipe.model, vocabulary, recipe.data.context)
    init = initialiser(torch.Generator(comm.device).manual_seed(recipe.run.seed))
    blocksize, options = blocksize_of(recipe.optimizer.name), shard_arguments(recipe.sharding)
    return shard(model, comm=comm, init=init, blocksize=blocksize, **options), ""


def logits(model: nn.Module, batch: MicroBatch) -> Tensor:
    """``[rows, context]`` ids → logits ``[rows, context, vocabulary]`` of the id after each."""
    if isinstance(model, Decoder):
        of_ours: Tensor = model(batch.ids, batch.positions, batch.segments)
        return of_ours
    where = {} if batch.positions is None else {"position_ids": batch.positions}
    # Keys and values of earlier tokens serve generation alone; kept, they cost memory.
    out: Tensor = model(input_ids=batch.ids, use_cache=False, **where).logits
    return out
