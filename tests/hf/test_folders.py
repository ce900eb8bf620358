from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf

from tests.hf.folders import END, PAD, VOCABULARY, tiny


def test_a_folder_is_one_of_the_hub_s(tmp_path: Path) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(tiny("mixtral", tmp_path))
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.vocab_size == VOCABULARY > len(tokenizer)
    assert (tokenizer.eos_token, tokenizer.pad_token) == (END, PAD)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "def"}]
    ids: Any = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=False)
    with torch.no_grad():
        assert model(ids).logits.isfinite().all()
