"""Generates text with a sharded model: the same forward passes on every rank.

A forward pass of a sharded model is a collective, so a rank that stopped at an end token would
leave the others waiting. Every rank makes the requested number of passes, and the text is cut at
the end token afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.train.batches import MicroBatch
from shardwise.train.conversations import alpaca
from shardwise.train.language_model import logits
from shardwise.train.records import Sampled
from shardwise.train.tokenizer import end_id, of_transformers

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from shardwise.recipe.recipe import Recipe

CODE, QUESTION = "def ", "Write a function that adds two numbers."


def sample(model: nn.Module, tokenizer: Tokenizer, recipe: Recipe) -> Sampled:
    """Generate text after the recipe's prompt, up to the end token. A collective."""
    config = recipe.sample
    is_code = recipe.data.format in ("text", "completion")
    prompt = config.prompt or (CODE if is_code else QUESTION)
    ids = torch.tensor(
        _prompt_ids(prompt, tokenizer, recipe), device=next(model.parameters()).device
    )
    generator = torch.Generator().manual_seed(recipe.run.seed)  # the same on every rank
    context = recipe.data.context
    written = generate(model, ids, config.tokens, context, config.temperature, generator)
    new, end = written[len(ids) :].tolist(), end_id(tokenizer, recipe.tokenizer.end)
    text = tokenizer.decode(new[: new.index(end)] if end in new else new)
    return Sampled(prompt, text, continues=recipe.data.format == "text")


def _prompt_ids(prompt: str, tokenizer: Tokenizer, recipe: Recipe) -> list[int]:
    """The prompt as training has it: of text, without the tokenizer's special tokens."""
    form = recipe.data.format
    if form == "text":
        return list(tokenizer.encode(prompt, add_special_tokens=False).ids)
    added = recipe.adapter.new_tokens
    by: Any = of_transformers(tokenizer.to_str(), recipe.tokenizer, added)
    if form in ("messages", "sharegpt"):
        question = [{"role": "user", "content": prompt}]
        text = by.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        return list(by.encode(text, add_special_tokens=False))
    text = alpaca(prompt).prompt if form == "alpaca" else prompt
    ids = list(by.encode(text, split_special_tokens=True))
    return ids[:-1] if ids[-1:] == [by.eos_token_id] else ids  # the end is after the answer


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
    below = logits.double() - logits.max()  # at most 0, so that a tiny temperature is greedy
    return torch.multinomial((below / temperature).softmax(-1), 1, generator=generator)
