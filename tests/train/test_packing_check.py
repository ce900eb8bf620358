from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

from shardwise.errors import ConfigError
from shardwise.train.packed import SampleRows
from shardwise.train.packing_check import check_packing
from tests.hf.folders import ARCHITECTURES, SHAPE
from tests.train.test_packed import CONTEXT, SAMPLES, everything, loss

READ_EACH_OTHER = {"bloom", "falcon", "gpt_oss", "mamba", "opt"}
"""As transformers 5.23 has them: without positions, with a state, or with a mask of their own."""

TESTED = {"llama", "gpt2", "gemma3_text", "deepseek_v3", "qwen3_moe"}


def model(architecture: str) -> nn.Module:
    special: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
    shape = {**SHAPE, **special, **ARCHITECTURES[architecture]}
    built: nn.Module = hf.AutoModelForCausalLM.from_config(
        hf.AutoConfig.for_model(architecture, **shape)
    )
    return built


@pytest.mark.parametrize(
    "architecture",
    [
        name if name in TESTED else pytest.param(name, marks=pytest.mark.prove)
        for name in sorted(ARCHITECTURES.keys() - READ_EACH_OTHER)
    ],
)
def test_models_that_keep_samples_apart_are_passed_and_do(architecture: str) -> None:
    causal = model(architecture).eval()
    check_packing(causal, 320, torch.device("cpu"))
    packed, alone = SampleRows(SAMPLES, CONTEXT), SampleRows(SAMPLES, CONTEXT, packed=False)
    with torch.no_grad():
        each = [loss(causal, alone.take(np.array([i]))).item() for i in range(len(alone))]
        assert loss(causal, everything(packed)).item() == pytest.approx(sum(each), rel=1e-5)


@pytest.mark.parametrize("architecture", sorted(READ_EACH_OTHER))
@pytest.mark.filterwarnings("ignore")
def test_models_in_which_samples_read_each_other_are_refused(architecture: str) -> None:
    with pytest.raises(ConfigError, match=r"logits by up to .* Set data.packing: false; or conca"):
        check_packing(model(architecture), 320, torch.device("cpu"))


def test_a_model_without_positions_is_refused() -> None:
    class Plain(nn.Module):
        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> None: ...

    with pytest.raises(ConfigError, match=r"data.packing is true, and Plain takes no position_ids"):
        check_packing(Plain(), 320, torch.device("cpu"))
