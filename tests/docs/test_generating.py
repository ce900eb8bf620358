"""The programs on the page on generating give the plain model's tokens."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests.ranks import run_threads

PAGE = Path(__file__).parents[2] / "docs" / "generating.md"
PROMPTS = [1, 5, 9], [4, 2]


@pytest.fixture(scope="module")
def plain() -> Any:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads, eos_token_id=None))
    for param in model.parameters():  # an initialisation makes all tokens nearly as likely
        nn.init.normal_(param, std=0.5)
    return model.eval()


def functions() -> dict[str, Any]:
    """What the page's programs define."""
    defined: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        exec(compile(block, "generating.md", "exec"), defined)
    return defined


def test_every_rank_has_the_plain_models_tokens(plain: Any) -> None:
    generate, models = functions()["generate"], [deepcopy(plain) for _ in range(2)]
    ids = torch.tensor([PROMPTS[0]])
    expected = plain.generate(ids, attention_mask=ids > 0, max_new_tokens=8, do_sample=False)
    for tokens in run_threads(2, lambda comm: generate(models[comm.rank], PROMPTS[0], comm)):
        assert torch.equal(tokens, expected)


def test_a_rank_with_a_prompt_of_its_own_needs_no_other_rank(plain: Any) -> None:
    generate, models = functions()["generate_by_rank"], [deepcopy(plain) for _ in range(2)]

    def rank(comm: Comm) -> Any:
        sharded = sw.shard(models[comm.rank], comm=comm)
        return generate(sharded, PROMPTS[comm.rank])

    for prompt, tokens in zip(PROMPTS, run_threads(2, rank), strict=True):
        ids = torch.tensor([prompt])
        expected = plain.generate(ids, attention_mask=ids > 0, max_new_tokens=8, do_sample=False)
        assert torch.equal(tokens, expected)
