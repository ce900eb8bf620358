"""What is the same for every engine: base, samples in rows, adapter, optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shardwise.recipe.recipe import Recipe
from shardwise.train import tokenizer as bpe
from shardwise.train.batches import Batches, RowSource
from shardwise.train.packed import Examples, SampleRows
from shardwise.train.samples import in_rows, read_samples, tokenize_split

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

SEED = 0
LEARNING_RATE = 2e-3
BETAS = (0.9, 0.95)
CLIP = 1.0


@dataclass(frozen=True)
class Setup:
    """One fine-tuning run."""

    base: str  # a folder of transformers
    pairs: str  # the folder of ``write_pairs``
    steps: int
    rows: int  # in a step, over all ranks
    context: int
    ranks: int = 2

    @cached_property
    def recipe(self) -> Recipe:
        """A recipe of the samples and batches; the schedule is constant."""
        return Recipe.model_validate({
            "tokenizer": {"source": self.base},
            "data": {
                "format": "completion",
                "source": f"{self.pairs}/training.jsonl",
                "validation_source": f"{self.pairs}/validation.jsonl",
                "context": self.context,
            },
            "batch": {"rows": self.rows, "micro": self.rows // self.ranks},
            "optimizer": {
                "lr": LEARNING_RATE, "schedule": "constant", "betas": BETAS, "clip": CLIP,
                "weight_decay": 0.0,
            },
            "run": {"steps": self.steps, "seed": SEED},
        })  # fmt: skip

    def splits(self) -> tuple[RowSource, RowSource]:
        """The rows to train on, and those for validation."""
        text = (Path(self.base) / "tokenizer.json").read_text("utf-8")
        tokenizer, data = bpe.of_transformers(text, self.recipe.tokenizer), self.recipe.data
        training, validation = (
            in_rows(tokenize_split(split, tokenizer, data).examples, data)
            for split in read_samples(data)
        )
        return training, validation

    def batches(self, rows: RowSource, rank: int) -> Batches:
        """One rank's micro-batches; what every engine is given."""
        return Batches(rows, self.recipe.batch, SEED, rank, self.ranks)


@dataclass(frozen=True)
class LongPrompts(Setup):
    """Random samples for a base of ``vocabulary``: three quarters of their tokens are prompts."""

    vocabulary: int = 32_768

    def splits(self) -> tuple[RowSource, RowSource]:
        """The same rows for both."""
        samples = self.steps * self.rows
        ids = np.random.default_rng(SEED).integers(0, self.vocabulary, samples * self.context)
        trained = np.tile(np.arange(self.context) >= 3 * self.context // 4, samples)
        lengths = np.full(samples, self.context)
        rows = SampleRows(Examples(ids.astype(np.int32), trained, lengths), self.context)
        return rows, rows


def write_base(like: str, folder: str, vocabulary: int) -> None:
    """Write a base of the shape of ``like`` with random weights for another vocabulary."""
    import transformers

    torch.manual_seed(SEED)
    config = transformers.AutoConfig.from_pretrained(like, vocab_size=vocabulary)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def lora() -> LoraConfig:
    """Adapters on all linear layers but the head."""
    import peft

    return peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def four_bits() -> BitsAndBytesConfig:
    """nf4 with scales in 8 bits, computed in float32: CPUs have no faster dtype."""
    import transformers

    options: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **options
    )
