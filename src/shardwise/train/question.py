"""A recipe as a question to a planner: its model without values, and the settings it has chosen."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.api.nn import chunked_cross_entropy
from shardwise.config.prefetch import Prefetch
from shardwise.hf.labelled import head_of
from shardwise.plan.forecast.candidate import Candidate
from shardwise.plan.forecast.machine import Machine
from shardwise.plan.forecast.question import Question
from shardwise.recipe.recipe import Recipe
from shardwise.recipe.shard_arguments import shard_arguments
from shardwise.train.decoder import Decoder
from shardwise.train.model_folder import check_context, on_meta
from shardwise.train.optimizer import blocksize_of, state_of

BY_CANDIDATES = ("strategy", "mesh", "unsharded", "activation_checkpointing", "offload", "prefetch")


def model_of(recipe: Recipe, vocabulary: int | None = None) -> nn.Module:
    """The recipe's model on the meta device; attention needs no mask there.

    Args:
        vocabulary: of a decoder of ours; ``None``: as the recipe says.
    """
    if recipe.model.source is not None:
        from shardwise.hf.causal_attention import make_causal

        whole = on_meta(recipe)
        make_causal(whole)
        return whole
    with torch.device("meta"):
        size = vocabulary or recipe.tokenizer.vocabulary
        return Decoder(recipe.model, size, recipe.data.context)


def question_of(recipe: Recipe, model: nn.Module, machine: Machine, ranks: int) -> Question:
    """Ask what training ``model`` by the recipe takes on ``ranks`` ranks of ``machine``."""
    if recipe.model.source is not None:
        check_context(recipe, model.config)
    arguments = shard_arguments(recipe.sharding)
    rest = {key: value for key, value in arguments.items() if key not in BY_CANDIDATES}
    options = {"use_cache": False} if recipe.model.source is not None else {}
    length = recipe.data.context
    return Question(
        model,
        lambda rows: ((torch.zeros(rows, length, dtype=torch.int64),), options),
        machine,
        ranks,
        recipe.batch.rows,
        state_of(recipe),
        {**rest, "blocksize": blocksize_of(recipe.optimizer.name)},
        loss=cross_entropy,
        each=recipe.sharding.sync_each_micro_batch,
    )


def chosen_by(recipe: Recipe) -> Candidate:
    """The recipe's own settings; those that candidates do not have are as they are written."""
    sharding, arguments = recipe.sharding, shard_arguments(recipe.sharding)
    usual = {"unsharded": None, "prefetch": Prefetch()}
    written = {key: arguments[key] for key, value in usual.items() if arguments[key] != value}
    if sharding.activation_offload:
        written["activation_checkpointing"] = arguments["activation_checkpointing"]
    return Candidate(
        sharding.strategy,
        recipe.batch.micro,
        sharding.mesh,
        int(sharding.activation_checkpointing),
        sharding.offload,
        written=tuple((key, _hashable(value)) for key, value in written.items()),
    )


def cross_entropy(output: Any) -> Tensor:
    """The loss of a causal language model, of all logits at once."""
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    every = logits.float().flatten(0, 1)
    targets = torch.zeros(every.shape[0], dtype=torch.int64, device=every.device)
    return F.cross_entropy(every, targets, reduction="sum")


def with_loss_in_head(question: Question) -> Question:
    """The same, as the trainer computes the loss: some logits at a time, in place of all.

    For memory only. The head's gradients are made in its forward pass, and FLOP of a model are
    counted by forward passes.
    """
    head = head_of(question.model)
    head.forward = MethodType(_loss_in_place, head)
    return replace(question, loss=_computed)


def _computed(output: Any) -> Tensor:
    loss: Tensor = output if isinstance(output, Tensor) else output.logits
    return loss


def _loss_in_place(head: nn.Module, hidden: Tensor) -> Tensor:
    target = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    own = vars(head).pop("forward")
    try:
        compute = partial(chunked_cross_entropy, ignore_index=None, reduction="sum")
        return compute(hidden, head, target)
    finally:
        head.forward = own


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
