"""Heads that compute the loss in place of logits: that of transformers' own forward, and why not.

The truth is the model's own logits, whose cross-entropy leaves out the places without a label.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.api import nn as losses
from shardwise.comm.protocol import Comm
from shardwise.hf.labelled import TESTED, head_of, in_place_of_logits, why_all_logits
from shardwise.hf.quantized import quantize
from shardwise.plan import in_slot
from tests.copies import assert_near, local
from tests.hf.folders import ARCHITECTURES, HEADS_OF_8, SHAPE, VOCABULARY
from tests.hf.quantising import quantising_one_at_a_time
from tests.ranks import run_sharing, run_threads
from tests.steps import averaged

one_at_a_time = quantising_one_at_a_time
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

Batch = tuple[Tensor, Tensor]

KINDS = {
    "GPT2LMHeadModel": "gpt2",
    "GPTNeoXForCausalLM": "gpt_neox",
    "GemmaForCausalLM": "gemma",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "OPTForCausalLM": "opt",
    "Olmo2ForCausalLM": "olmo2",
    "Phi3ForCausalLM": "phi3",
    "PhiForCausalLM": "phi",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SmolLM3ForCausalLM": "smollm3",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
}


@pytest.fixture(autouse=True)
def _as_in_a_large_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LEAST_ROWS", 3)
    monkeypatch.setattr(in_slot, "LARGE", 1)


def model_of(kind: str, **options: Any) -> Any:
    shape = {**SHAPE, "pad_token_id": None, **ARCHITECTURES.get(kind, HEADS_OF_8), **options}
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(kind, **shape))


def batch_of(rank: int, labels: int) -> Batch:
    """Ids, and targets of which the last ``labels`` of the second row have one."""
    draw = torch.Generator().manual_seed(rank)
    ids = torch.randint(VOCABULARY, (2, 8), generator=draw)
    targets = torch.full((2, 8), -100)
    targets[1, 8 - labels :] = ids[1, 8 - labels :]
    return ids, targets


def plain(model: Any, batch: Batch) -> Tensor:
    logits = model(input_ids=batch[0], use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum")


def labelled(model: Any, batch: Batch) -> Tensor:
    head = head_of(model)

    def compute(hidden: Tensor) -> Tensor:
        return sw.nn.chunked_cross_entropy(hidden, head, batch[1], reduction="sum")

    with in_place_of_logits(head, compute) as computed:
        model(input_ids=batch[0], use_cache=False)
    return computed[0]


# ---- classes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_the_loss_of_a_tested_class_and_its_gradients_are_those_of_its_logits(name: str) -> None:
    mine, batch = model_of(KINDS[name]), batch_of(0, 5)
    right = deepcopy(mine)
    loss, expected = labelled(mine, batch), plain(right, batch)
    loss.backward()
    expected.backward()
    assert_near(loss.detach(), expected.detach())
    gradients = [
        [p.grad for p in model.parameters() if p.grad is not None] for model in (mine, right)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    assert "forward" not in vars(head_of(mine))
    assert why_all_logits(sw.shard(mine)) == ""


def test_every_class_of_the_table_is_here() -> None:
    assert {"Decoder", *KINDS} == TESTED


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("gemma2", "Gemma2ForCausalLM changes them (final_logit_softcapping)"),
        ("cohere", "CohereForCausalLM changes them (logit_scale)"),
        ("granite", "GraniteForCausalLM changes them (logits_scaling)"),
        ("bloom", "BloomForCausalLM is not a tested class"),
    ],
)
def test_another_class_computes_all_logits_and_says_why(kind: str, why: str) -> None:
    assert why_all_logits(sw.shard(model_of(kind))) == why


def test_a_forward_of_ones_own_is_another_class() -> None:
    class LlamaForCausalLM(hf.LlamaForCausalLM):
        def forward(self, *args: Any, **options: Any) -> Any:
            return super().forward(*args, **options)

    model = LlamaForCausalLM(model_of("llama").config)
    assert why_all_logits(sw.shard(model)) == "LlamaForCausalLM is not a tested class"
    assert why_all_logits(sw.shard(nn.Linear(2, 2))) == "Linear is not a tested class"


def test_compiled_models_and_learned_prompts_compute_all_logits() -> None:
    compiled = sw.shard(model_of("llama"), compile="eager")
    assert why_all_logits(compiled) == "it is compiled"
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    prompted: Any = peft.get_peft_model(model_of("llama"), config)
    assert why_all_logits(sw.shard(prompted)) == "a learned prompt is in front of its tokens"


@pytest.mark.parametrize("mixed", [False, True])
def test_adapters_need_no_more_logits(mixed: bool) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    adapted: Any = peft.get_peft_model(model_of("llama"), config, mixed=mixed)
    assert why_all_logits(sw.shard(adapted)) == ""


def test_a_head_whose_forward_is_replaced_computes_all_logits() -> None:
    sharded = sw.shard(model_of("llama"))
    head_of(sharded.model).forward = lambda hidden: hidden
    assert why_all_logits(sharded) == "the forward of its head is replaced"


def test_the_engines_own_forward_of_a_head_counts_as_none_and_is_put_back() -> None:
    sharded = sw.shard(model_of("llama"))
    own = vars(head_of(sharded.model))["forward"]
    assert in_slot.is_in_slot(own)
    assert why_all_logits(sharded) == ""
    labelled(sharded.model, batch_of(0, 5)).backward()
    assert vars(head_of(sharded.model))["forward"] is own


def test_the_head_is_as_it_was_after_an_error() -> None:
    head = nn.Linear(2, 2)
    for called in (True, False):
        with pytest.raises(ZeroDivisionError), in_place_of_logits(head, lambda _: 1 / 0):  # type: ignore[arg-type,return-value]
            head(torch.ones(1)) if called else 1 / 0
        assert "forward" not in vars(head)


# ---- heads -------------------------------------------------------------------------------------


ADAPTERS: dict[str, dict[str, Any]] = {
    "Linear": {},
    "lora.Linear": {"target_modules": ["q_proj", "lm_head"]},
    "ModulesToSaveWrapper": {"modules_to_save": ["lm_head"]},
    "TrainableTokensWrapper": {"trainable_token_indices": {"embed_tokens": [3], "lm_head": [3, 5]}},
    "Linear4bit": {},
}
"""By the class of the head: what a ``LoraConfig`` has besides."""


def with_head(kind: str) -> Any:
    """A model whose head is tied, with an adapter, or quantised."""
    model = model_of("llama", tie_word_embeddings=kind == "Linear")
    if kind == "Linear":
        return model
    if kind == "Linear4bit":
        bits = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
        quantize(model, hf.BitsAndBytesConfig(llm_int8_skip_modules=["q_proj"], **bits))
    lora = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **ADAPTERS[kind]}
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(**lora))
    for name, param in adapted.named_parameters():  # B begins at zero
        if "lora_B" in name:
            nn.init.normal_(param)
    assert type(head_of(adapted)).__name__ == kind.rpartition(".")[2]
    return adapted


@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize(
    ("strategy", "world", "run"),
    [("full_shard", 2, run_sharing), ("full_shard", 3, run_threads), ("no_shard", 2, run_threads)],
)
def test_gradients_on_shards_are_the_mean_of_plain_ones(
    kind: str, strategy: str, world: int, run: Any
) -> None:
    """The ranks have 7, 0 and 3 labels."""
    batches = [batch_of(rank, labels) for rank, labels in enumerate((7, 0, 3)[:world])]
    models = [with_head(kind) for _ in range(world)]
    expected = averaged(
        models[0], lambda model, batch: plain(model, (batch[0], batch[1])).backward(), batches
    )

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        sharded = sw.shard(model, strategy, comm=comm)
        for _ in range(2):
            model.zero_grad()
            labelled(model, batches[comm.rank]).backward()
        with sharded.full_params():
            for name, param in model.named_parameters():
                if param.requires_grad:
                    assert_near(local(param.grad), expected[name])

    run(world, rank)
