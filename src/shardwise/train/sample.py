"""Generates text with a sharded model: the same forward passes on every rank.

A forward pass of a sharded model is a collective, so a rank that stopped at an end token would
leave the others waiting. Every rank makes the requested number of passes, and the text is cut at
the end token afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.train.decoder import Decoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from shardwise.train.config import SampleConfig

__all__ = ["generate", "sample"]


def sample(
    model: Decoder,
    tokenizer: Tokenizer,
    config: SampleConfig,
    generator: torch.Generator,
    end: int,
) -> str:
    """The model's continuation of ``config.prompt``, without the prompt. A collective.

    Args:
        generator: on the CPU, with the same state on every rank.
        end: the id at which the text is cut.
    """
    prompt = tokenizer.encode(config.prompt, add_special_tokens=False).ids
    device = next(model.parameters()).device
    ids = generate(
        model, torch.tensor(prompt, device=device), config.tokens, config.temperature, generator
    )
    new = ids[len(prompt) :].tolist()
    text: str = tokenizer.decode(new[: new.index(end)] if end in new else new)
    return text


def generate(
    model: Decoder, ids: Tensor, count: int, temperature: float, generator: torch.Generator
) -> Tensor:
    """``ids`` followed by ``count`` generated ids, ``[n] → [n + count]`` int64.

    The model sees the last ``model.context`` ids. There is no KV cache, which keeps the model
    simple and makes generation slow.

    Args:
        model: the decoder, sharded or not.
        ids: the prompt.
        count: number of generated ids and of forward passes.
        temperature: of the softmax; 0 = greedy decoding.
        generator: on the CPU, with the same state on every rank.
    """
    training = model.training
    model.eval()
    with torch.no_grad():
        for _ in range(count):
            logits = model(ids[None, -model.context :])[0, -1].float().cpu()
            ids = torch.cat([ids, _draw_token(logits, temperature, generator).to(ids.device)])
    model.train(training)
    return ids


def _draw_token(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One id, ``[vocabulary] → [1]``."""
    if temperature == 0:
        return logits.argmax(keepdim=True)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
