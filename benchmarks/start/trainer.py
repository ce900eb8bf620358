"""Fine-tuning by transformers' Trainer and peft, as a user writes it; says when a phase has ended.

torchrun --nproc-per-node 2 -m benchmarks.start.trainer MODEL PAIRS CONTEXT ddp|fsdp2
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def say(phase: str) -> None:
    """Say on rank 0 that this phase is over."""
    if os.environ["RANK"] == "0":
        print(f"{phase} is over", flush=True)


def main(model: str, pairs: str, context: int, engine: str) -> None:
    """Train until the first step is taken."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class FirstStep(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            say("step")

    options: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2}}
    arguments = TrainingArguments(
        tempfile.mkdtemp(), use_cpu=True, ddp_backend="gloo", max_steps=1, save_strategy="no",
        per_device_train_batch_size=1, report_to="none", disable_tqdm=True,
        **(options if engine == "fsdp2" else {}),
    )  # fmt: skip
    say("imports")
    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = Path(pairs).read_text("utf-8").splitlines()
    texts = ["".join(json.loads(line).values()) for line in lines]
    encoded = tokenizer(texts, truncation=True, max_length=context, padding="max_length")
    rows = [{"input_ids": ids, "labels": ids} for ids in encoded["input_ids"]]
    say("data")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    dataset: Any = rows
    trainer = Trainer(
        get_peft_model(base, lora), arguments, train_dataset=dataset, callbacks=[FirstStep()]
    )
    if engine == "fsdp2":
        from benchmarks.finetune.fsdp2_on_cpus import force

        force(trainer)
    say("model")
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
