from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.comm import threads
from shardwise.comm.protocol import Comm
from shardwise.train import tokenizer as bpe
from shardwise.train.config import SampleConfig
from shardwise.train.decoder import Decoder
from shardwise.train.job import build
from shardwise.train.model_config import ModelConfig
from shardwise.train.sample import generate, sample
from tests.train.test_job import VOCABULARY, rows
from tests.train.tiny import documents, tiny_recipe

SHAPE = ModelConfig(width=16, layers=2, heads=4, kv_heads=2, hidden=24)


def generated(model: nn.Module, count: int, temperature: float, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    begin, context = torch.tensor([3, 4]), 16
    ids: list[int] = generate(model, begin, count, context, temperature, generator).tolist()
    return ids


def test_greedy_text_is_that_of_transformers() -> None:
    from tests.train.test_decoder import TIED, llama

    model = Decoder(TIED, vocabulary=61, context=16)
    wanted = llama(model, TIED).generate(  # type: ignore[operator]
        torch.tensor([[3, 4]]), max_new_tokens=9, do_sample=False, eos_token_id=None
    )
    assert generated(model, 9, temperature=0) == wanted[0].tolist()


def test_text_may_be_longer_than_the_context() -> None:
    model = Decoder(SHAPE, vocabulary=61, context=16)
    assert len(generated(model, 20, temperature=0)) == 22


def test_a_seed_fixes_what_is_drawn() -> None:
    model = Decoder(SHAPE, vocabulary=61, context=32)
    assert generated(model, 20, 1.0, seed=1) == generated(model, 20, 1.0, seed=1)
    assert generated(model, 20, 1.0, seed=1) != generated(model, 20, 1.0, seed=2)


def test_the_model_is_left_as_it_was() -> None:
    model = Decoder(SHAPE, vocabulary=61, context=32)
    generated(model, 1, 0)
    assert model.training
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_of_a_sharded_model_writes_the_same(
    tmp_path: Path, world: int, temperature: float
) -> None:
    recipe = tiny_recipe(tmp_path)

    def rank(comm: Comm) -> list[int]:
        return generated(build(recipe, comm, rows(), VOCABULARY).model, 6, temperature)

    (alone,) = threads.run(1, rank)
    assert threads.run(world, rank) == [alone] * world


def test_text_ends_at_the_end_token() -> None:
    tokenizer = bpe.load(bpe.train(documents(), 300))
    model = Decoder(SHAPE, vocabulary=300, context=32)
    with torch.no_grad():  # every logit is 0 but the one that follows from the norm's scale
        model.model.embed_tokens.weight.zero_()
    config = SampleConfig(prompt="def", tokens=5)  # argmax of equal logits is id 0, the end
    assert sample(model, tokenizer, config, 32, torch.Generator(), 0) == ""


def test_the_prompt_is_not_repeated() -> None:
    tokenizer = bpe.load(bpe.train(documents(), 300))
    model = Decoder(SHAPE, vocabulary=300, context=32)
    config = SampleConfig(prompt="def", tokens=3)
    text = sample(model, tokenizer, config, 32, torch.Generator(), 0)
    prompt = torch.tensor(tokenizer.encode("def").ids)
    ids = generate(model, prompt, 3, 32, 0.0, torch.Generator())[len(prompt) :].tolist()
    assert text == tokenizer.decode(ids)
