"""Generates text with a sharded model: the same forward passes on every rank.

A forward pass of a sharded model is a collective, so a rank that stopped at an end token would
leave the others waiting. Every rank makes the requested number of passes, and the text is cut at
the end token afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shardwise.train.batches import MicroBatch
from shardwise.train.language_model import logits

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from shardwise.train.config import SampleConfig

__all__ = ["generate", "sample"]


def sample(
    model: nn.Module,
    tokenizer: Tokenizer,
    config: SampleConfig,
    context: int,
    generator: torch.Generator,
    end: int,
) -> str:
    """The model's continuation of ``config.prompt``, without the prompt. A collective.

    Args:
        context: the longest row that the model takes.
        generator: on the CPU, with the same state on every rank.
        end: the id at which the text is cut.
    """
    prompt = tokenizer.encode(config.prompt, add_special_tokens=False).ids
    device = next(model.parameters()).device
    given = torch.tensor(prompt, device=device)
    ids = generate(model, given, config.tokens, context, config.temperature, generator)
    new = ids[len(prompt) :].tolist()
    text: str = tokenizer.decode(new[: new.index(end)] if end in new else new)
    return text


def generate(
    model: nn.Module,
    ids: Tensor,
    count: int,
    context: int,
    temperature: float,
    generator: torch.Generator,
) -> Tensor:
    """``ids`` followed by ``count`` generated ids, ``[n] → [n + count]`` int64.

    The model sees the last ``context`` ids. There is no KV cache, so generation is slow.

    Args:
        model: a causal language model, sharded or not.
        ids: the prompt.
        count: number of generated ids and of forward passes.
        temperature: of the softmax; 0 = greedy decoding.
        generator: on the CPU, with the same state on every rank.
    """
    training = model.training
    model.eval()
    with torch.no_grad():
        for _ in range(count):
            window = ids[None, -context:]
            last = logits(model, MicroBatch(window, window))[0, -1].float().cpu()
            ids = torch.cat([ids, _draw_token(last, temperature, generator).to(ids.device)])
    model.train(training)
    return ids


def _draw_token(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One id, ``[vocabulary] → [1]``."""
    if temperature == 0:
        return logits.argmax(keepdim=True)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
