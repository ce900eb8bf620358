from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import nn

from shardwise.comm.protocol import Comm
from shardwise.comm.transports import threads
from shardwise.recipe.model_config import ModelConfig
from shardwise.recipe.recipe import Recipe
from shardwise.train import tokenizer as bpe
from shardwise.train.conversations import sample as of_row
from shardwise.train.decoder import Decoder
from shardwise.train.examples import tokenize, write
from shardwise.train.hf_config import WEIGHTS
from shardwise.train.job import build
from shardwise.train.records import Sampled
from shardwise.train.sample import generate, sample
from tests.hf.folders import END, START, tiny_tokenizer
from tests.train.runs import Watched
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
    expected = llama(model, TIED).generate(  # type: ignore[operator]
        torch.tensor([[3, 4]]), max_new_tokens=9, do_sample=False, eos_token_id=None
    )
    assert generated(model, 9, temperature=0) == expected[0].tolist()


def test_text_may_be_longer_than_the_context() -> None:
    model = Decoder(SHAPE, vocabulary=61, context=16)
    assert len(generated(model, 20, temperature=0)) == 22


def test_a_seed_fixes_what_is_drawn() -> None:
    model = Decoder(SHAPE, vocabulary=61, context=32)
    assert generated(model, 20, 1.0, seed=1) == generated(model, 20, 1.0, seed=1)
    assert generated(model, 20, 1.0, seed=1) != generated(model, 20, 1.0, seed=2)


@pytest.mark.parametrize("temperature", [1e-6, 1e-45, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    model = Decoder(SHAPE, vocabulary=61, context=16)
    assert generated(model, 9, temperature) == generated(model, 9, temperature=0)


def test_a_sample_that_fails_costs_nothing_that_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Sampled:
        raise KeyError("prompt")

    monkeypatch.setattr("shardwise.train.results.sample", fail)
    with pytest.raises(KeyError, match="prompt"):
        Watched(monkeypatch).run(tiny_recipe(tmp_path, "run.steps=1"), 1)
    for name in (WEIGHTS, "eval_results.json"):
        assert (tmp_path / "run" / name).is_file()


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
    recipe = Recipe.model_validate({"sample": {"prompt": "x", "tokens": 5}})
    assert sample(model, tokenizer, recipe) == Sampled(
        "x", ""
    )  # of equal logits the first, the end


def test_the_prompt_is_not_repeated() -> None:
    tokenizer = bpe.load(bpe.train(documents(), 300))
    model = Decoder(SHAPE, vocabulary=300, context=32)
    recipe = Recipe.model_validate({"sample": {"tokens": 3}, "data": {"context": 32}})
    prompt = torch.tensor(tokenizer.encode("def ").ids)
    ids = generate(model, prompt, 3, 32, 0.0, torch.Generator())[len(prompt) :].tolist()
    assert sample(model, tokenizer, recipe) == Sampled("def ", tokenizer.decode(ids))


QUESTION = "Write a function that adds two numbers."


def sampling_recipe(folder: Path, form: str, prompt: str | None) -> Recipe:
    return Recipe.model_validate(
        {
            "tokenizer": {"source": str(folder), "end": END},
            "data": {"format": form, "source": "a.jsonl"},
            "sample": {"prompt": prompt, "tokens": 2},
        }
    )


def asked_of(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, recipe: Recipe
) -> tuple[list[int], Sampled]:
    """The ids that a model is given, which answers nothing, and what is shown."""
    prompts: list[list[int]] = []

    def answer(_model: object, ids: torch.Tensor, *_: object) -> torch.Tensor:
        prompts.append(ids.tolist())
        return ids

    monkeypatch.setattr("shardwise.train.sample.generate", answer)
    shown = sample(Decoder(SHAPE, vocabulary=8, context=8), tokenizer, recipe)
    return prompts[0], shown


@pytest.mark.parametrize(
    ("form", "prompt", "end"),
    [
        ("messages", None, f"<|im_start|>user\n{QUESTION}<|im_end|><|im_start|>assistant\n"),
        ("sharegpt", "Why?", "<|im_start|>user\nWhy?<|im_end|><|im_start|>assistant\n"),
        ("alpaca", "Why?", "### Instruction:\nWhy?\n\n### Response:"),
        ("completion", None, "def "),
    ],
)
def test_a_model_is_asked_as_the_samples_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, prompt: str | None, end: str
) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    recipe = sampling_recipe(tmp_path, form, prompt)
    tokenizer = bpe.load((tmp_path / "tokenizer.json").read_text("utf-8"))
    asked_ids, shown = asked_of(monkeypatch, tokenizer, recipe)
    assert tokenizer.decode(asked_ids, skip_special_tokens=False).endswith(end)
    question = prompt or (QUESTION if form == "messages" else "def ")
    assert shown == Sampled(question, "", continues=False)
    is_chat = form in ("messages", "sharegpt")
    assert (tokenizer.token_to_id("<|im_start|>") in asked_ids) == is_chat


@pytest.mark.parametrize("form", ["alpaca", "completion"])
def test_the_prompt_has_the_special_tokens_of_training_but_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """A Llama's samples begin with its token of the beginning."""
    by = tiny_tokenizer()
    first, end = by.convert_tokens_to_ids(START), by.eos_token_id
    by.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=[(START, first), (END, end)]
    )
    by.save_pretrained(tmp_path)
    row = {"instruction": "Why?", "output": " def", "prompt": "Why?", "completion": " def"}
    recipe = sampling_recipe(tmp_path, form, "Why?")
    trained = tokenize([write(of_row(row, recipe.data), by, "assistant")], by, 200).examples
    tokenizer = bpe.load((tmp_path / "tokenizer.json").read_text("utf-8"))
    ids, _ = asked_of(monkeypatch, tokenizer, recipe)
    assert ids == trained.ids[~trained.trained].tolist()
    assert ids[0] == first


def test_a_new_token_in_the_prompt_has_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    recipe = sampling_recipe(tmp_path, "messages", "<tool> x")
    adapter = recipe.adapter.model_copy(update={"new_tokens": ["<tool>"]})
    recipe = recipe.model_copy(update={"adapter": adapter})
    tokenizer = bpe.load((tmp_path / "tokenizer.json").read_text("utf-8"))
    tokenizer.add_tokens(["<tool>"])
    ids, _ = asked_of(monkeypatch, tokenizer, recipe)
    assert tokenizer.token_to_id("<tool>") in ids
