"""Text from a sharded model: the same forward passes on every rank.

Under sharding a forward pass is a collective, so a rank that stopped early (it drew the end
token, another one did not) would leave the others waiting. Every rank therefore makes exactly
as many passes as were asked for, and what follows an end token is cut off afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.train.decoder import Decoder
from shardwise.train.tokenizer import end_id

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from shardwise.train.config import SampleConfig

__all__ = ["continued", "sample"]


def sample(
    model: Decoder,
    tokenizer: Tokenizer,
    config: SampleConfig,
    seed: int,
    device: torch.device,
) -> str:
    """What the model writes after ``config.prompt``, without the prompt. A collective."""
    prompt = tokenizer.encode(config.prompt).ids
    generator = torch.Generator().manual_seed(seed)
    ids = continued(
        model, torch.tensor(prompt, device=device), config.tokens, config.temperature, generator
    )
    new = ids[len(prompt) :].tolist()
    end = end_id(tokenizer)
    text: str = tokenizer.decode(new[: new.index(end)] if end in new else new)
    return text


def continued(
    model: Decoder, ids: Tensor, count: int, temperature: float, generator: torch.Generator
) -> Tensor:
    """``ids`` and ``count`` more, ``[n] → [n + count]`` int64.

    The model sees the last ``model.context`` ids. It is run anew for each id, without a cache:
    that is 1/count as fast as it could be, and the model stays as simple as it is.

    Args:
        model: the decoder, sharded or not.
        ids: the prompt.
        count: forward passes, and so new ids.
        temperature: of the softmax; 0 takes the likeliest id.
        generator: draws the ids, on the CPU, from equal logits equally on every rank.
    """
    training = model.training
    model.eval()
    with torch.no_grad():
        for _ in range(count):
            logits = model(ids[None, -model.context :])[0, -1].float().cpu()
            ids = torch.cat([ids, _drawn(logits, temperature, generator).to(ids.device)])
    model.train(training)
    return ids


def _drawn(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One id, ``[vocabulary] → [1]``."""
    if temperature == 0:
        return logits.argmax(keepdim=True)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
