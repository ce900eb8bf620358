from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.recipe.model_config import ModelConfig
from shardwise.train.decoder import Block, Decoder, initialiser
from shardwise.train.hf_config import llama_config

SHAPE = ModelConfig(width=24, layers=3, heads=6, kv_heads=2, hidden=40, tied=False)
TIED = SHAPE.model_copy(update={"tied": True})
IDS = torch.randint(0, 61, (2, 13), generator=torch.Generator().manual_seed(1))


def llama(model: Decoder, config: ModelConfig) -> torch.nn.Module:
    """The same weights in `transformers`' own class."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig.from_dict(llama_config(config, 61, 16, 0, torch.float32))
    reference: torch.nn.Module = LlamaForCausalLM(shape).eval()
    reference.load_state_dict(model.state_dict())
    return reference


@pytest.mark.parametrize("config", [SHAPE, TIED])
def test_the_logits_are_those_of_llama(config: ModelConfig) -> None:
    model = Decoder(config, vocabulary=61, context=16)
    with torch.no_grad():
        expected: Tensor = llama(model, config)(IDS).logits
        assert torch.equal(model(IDS), expected)


@pytest.mark.parametrize("config", [SHAPE, TIED])
def test_the_names_are_those_of_llama(config: ModelConfig) -> None:
    model = Decoder(config, vocabulary=61, context=16)
    assert sorted(model.state_dict()) == sorted(llama(model, config).state_dict())


def test_on_the_meta_device_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """There ``normal_`` imports torch's compiler, which takes a second."""
    monkeypatch.setattr(torch.nn.init, "normal_", None)
    with torch.device("meta"):
        assert Decoder(SHAPE, vocabulary=61, context=16).lm_head.weight.is_meta


def test_no_token_sees_what_comes_after_it() -> None:
    model = Decoder(SHAPE, vocabulary=61, context=16)
    changed = IDS.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 61
    before, after = model(IDS), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_the_same_token_differs_by_position() -> None:
    logits = Decoder(SHAPE, vocabulary=61, context=16)(torch.tensor([[5, 9, 5]]))
    assert not torch.allclose(logits[0, 0], logits[0, 2])


def test_tied_models_have_one_matrix_for_both_ends() -> None:
    model = Decoder(TIED, vocabulary=61, context=16)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_table_of_angles_is_never_saved() -> None:
    model = Decoder(SHAPE, vocabulary=61, context=16)
    assert [name for name in model.state_dict() if "rotary" in name] == []
    assert len(list(model.buffers())) == 2


def test_residual_projections_start_narrower() -> None:
    wide = ModelConfig(width=256, layers=8, heads=4, kv_heads=4, hidden=512)
    with torch.device("meta"):
        block = Block(wide)
    block.to_empty(device="cpu")
    block.apply(initialiser(torch.Generator().manual_seed(0)))
    spreads = {
        name: param.std().item() for name, param in block.named_parameters() if param.ndim > 1
    }
    for name, std in spreads.items():
        expected = 0.02 / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        assert std == pytest.approx(expected, rel=0.05), name


def test_the_first_values_depend_on_the_generator_alone() -> None:
    def values() -> list[Tensor]:
        model = Decoder(SHAPE, vocabulary=61, context=16)
        model.apply(initialiser(torch.Generator().manual_seed(3)))
        return list(model.state_dict().values())

    before = torch.get_rng_state()
    first = values()
    torch.manual_seed(123)
    assert all(map(torch.equal, first, values()))
    torch.set_rng_state(before)


def test_initialising_does_not_touch_the_process_s_generator() -> None:
    model = Decoder(SHAPE, vocabulary=61, context=16)
    before = torch.get_rng_state()
    model.apply(initialiser(torch.Generator().manual_seed(3)))
    assert torch.equal(torch.get_rng_state(), before)
