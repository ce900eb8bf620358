"""The trainer's view of a model: to be built in shards, for the logits of a batch, and its loss.

Everything else in ``train`` takes any causal language model, of ours or of `transformers`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.api.nn import chunked_cross_entropy
from shardwise.api.shard import shard
from shardwise.api.sharded import Sharded
from shardwise.comm.protocol import Comm
from shardwise.hf.labelled import in_place_of_logits
from shardwise.recipe.recipe import Recipe
from shardwise.recipe.shard_arguments import shard_arguments
from shardwise.train import model_folder
from shardwise.train.batches import IGNORED, MicroBatch
from shardwise.train.decoder import Decoder, initialiser
from shardwise.train.optimizer import blocksize_of

ROWS = 128  # places whose logits are measured at a time


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


def summed_loss(
    model: nn.Module,
    batch: MicroBatch,
    head: nn.Module | None = None,
    ignored: int | None = IGNORED,
) -> Tensor:
    """The cross-entropy summed over the targets; with ``head``, it runs only where they are.

    ``ignored`` is the target of other places, ``None`` if there are none.
    """
    if head is None:
        every, targets = logits(model, batch).float().flatten(0, 1), batch.targets.flatten()
        return F.cross_entropy(every, targets, reduction="sum", ignore_index=IGNORED)
    compute = partial(
        chunked_cross_entropy,
        head=head,
        target=batch.targets,
        ignore_index=ignored,
        reduction="sum",
    )
    with in_place_of_logits(head, compute) as computed:
        logits(model, batch)
    return computed[0]


def summed(
    model: nn.Module,
    batch: MicroBatch,
    measure: Callable[[Tensor, Tensor], Tensor],
    head: nn.Module | None = None,
) -> Tensor:
    """``measure`` of ``[places, vocabulary]`` logits and their targets, summed; as for the loss."""
    if head is None:
        return measure(logits(model, batch).flatten(0, 1), batch.targets.flatten())
    to_logits, places = head.forward, batch.targets != IGNORED

    def compute(hidden: Tensor) -> Tensor:
        chunks = zip(hidden[places].split(ROWS), batch.targets[places].split(ROWS), strict=True)
        return torch.stack([measure(to_logits(rows), targets) for rows, targets in chunks]).sum(0)

    with in_place_of_logits(head, compute) as computed:
        logits(model, batch)
    return computed[0]
