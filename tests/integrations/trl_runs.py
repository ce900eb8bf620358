"""Jobs of ``test_trl.py``: a trainer of TRL on each rank; rank 0 leaves its log in a file."""

from __future__ import annotations

import importlib
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

from shardwise.integrations import trl as ours
from tests.integrations.trainer_runs import RANK, WORLD, llama

trl: Any = importlib.import_module("trl")  # it exports its names lazily, unseen by mypy

VOCABULARY = {word: k for k, word in enumerate(["<pad>", "<eos>", *(f"w{k}" for k in range(59))])}


def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )


def rows(*columns: str) -> Dataset:
    draw = random.Random(0)

    def text() -> str:
        return " ".join(f"w{draw.randrange(59)}" for _ in range(5))

    return Dataset.from_list([{column: text() for column in columns} for _ in range(32)])


def common(folder: Path, **more: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8 // WORLD,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    return options | more


def model() -> Any:
    return llama(pad_token_id=0, eos_token_id=1, bos_token_id=1)


def sft(kinds: Any, folder: Path) -> Any:
    args = trl.SFTConfig(**common(folder, max_length=16))
    return kinds.SFTTrainer(
        model=model(), args=args, train_dataset=rows("text"), processing_class=tokenizer()
    )


def dpo(kinds: Any, folder: Path) -> Any:
    args = trl.DPOConfig(**common(folder, max_length=16))
    return kinds.DPOTrainer(
        model=model(),
        ref_model=model(),
        args=args,
        train_dataset=rows("prompt", "chosen", "rejected"),
        processing_class=tokenizer(),
    )


def grpo(kinds: Any, folder: Path) -> Any:
    args = trl.GRPOConfig(**common(folder, num_generations=4, max_completion_length=6))
    return kinds.GRPOTrainer(
        model=model(),
        reward_funcs=by_length,
        args=args,
        train_dataset=rows("prompt"),
        processing_class=tokenizer(),
    )


def by_length(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(len(text) % 7) for text in completions]


JOBS: dict[str, Callable[[Any, Path], Any]] = {"sft": sft, "dpo": dpo, "grpo": grpo}


def main(job: str, folder: Path) -> None:
    """``job``: a name of ``JOBS``, with ``-plain`` for TRL's own class."""
    warnings.simplefilter("ignore")
    name, _, plain = job.partition("-")
    trainer = JOBS[name](trl if plain else ours, folder / job)
    trainer.train()
    log = trainer.state.log_history
    if RANK == 0:
        torch.save([line for line in log if "loss" in line], folder / f"{job}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
