"""The same fine-tuning by sharded modules and by transformers' Trainer with peft.

All read the same rows in the same order, normalise by the tokens of all ranks, and log each loss.

    full_shard, no_shard    sw.hf.load, the trainer's ``Job``, sw.optim.AdamW
    full_shard_4bit         the same on a base in 4 bits
    trainer_ddp             Trainer, peft, DistributedDataParallel
    trainer_fsdp2           Trainer, peft, FSDP2 by accelerate, which does not take it on CPUs by
                            itself: ``fsdp=True`` is dropped without a word (see ``fsdp2_on_cpus``)
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from benchmarks.finetune import fsdp2_on_cpus
from benchmarks.finetune.setup import BETAS, CLIP, LEARNING_RATE, SEED, Setup, four_bits, lora
from shardwise.comm.machine.connect import over
from shardwise.train.batches import Batches
from shardwise.train.collectives import all_gather_floats
from shardwise.train.job import Job

Lap = Callable[[float], None]
"""Called after each step with its loss, the mean over the tokens of all ranks."""
Engine = Callable[[Setup, Batches, Lap], None]

ARGUMENTS: dict[str, Any] = {
    "use_cpu": True, "ddp_backend": "gloo", "ddp_find_unused_parameters": False, "seed": SEED,
    "train_sampling_strategy": "sequential", "remove_unused_columns": False,
    "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", "max_grad_norm": CLIP,
    "adam_beta1": BETAS[0], "adam_beta2": BETAS[1], "logging_steps": 1, "save_strategy": "no",
    "report_to": "none", "disable_tqdm": True,
}  # fmt: skip
"""Of Trainer."""


def job_of(setup: Setup, batches: Batches, strategy: str = "full_shard", bits: int = 32) -> Job:
    """The base in shards, with a new adapter, in what ``shardwise train`` makes its steps with."""
    torch.manual_seed(SEED)
    options: dict[str, Any] = {"quantization": four_bits()} if bits == 4 else {}
    comm = over(dist.group.WORLD)
    loaded = sw.hf.load(setup.base, lora=lora(), comm=comm, strategy=strategy, **options)
    optimizer = sw.optim.AdamW(loaded.sharded, lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return Job(setup.recipe, loaded.model, loaded.sharded, optimizer, batches, scaler)


def take_steps(job: Job, lap: Lap) -> None:
    """All steps of the recipe."""
    for step in range(job.recipe.run.steps):
        loss = float(job.forward_backward(step))
        job.clip_and_set_lr(step)
        job.update()
        job.optimizer.zero_grad()
        lap(float(all_gather_floats(job.sharded.comm, [loss], "loss").sum()))


def _shardwise(setup: Setup, batches: Batches, lap: Lap, **options: Any) -> None:
    take_steps(job_of(setup, batches, **options), lap)


# ---- transformers' Trainer -----------------------------------------------------------------


def _trainer(setup: Setup, batches: Batches, lap: Lap, fsdp2: bool) -> None:
    import peft
    import transformers
    from torch.distributed.fsdp import FSDPModule

    class Laps(transformers.TrainerCallback):
        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            if "loss" in logs:  # the last record has none
                lap(logs["loss"])

    os.environ |= {"LOCAL_WORLD_SIZE": str(setup.ranks)}  # or accelerate asks for MASTER_ADDR
    base = transformers.AutoModelForCausalLM.from_pretrained(setup.base)
    base.config.use_cache = False
    torch.manual_seed(SEED)
    model = peft.get_peft_model(base, lora())
    options: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2}} if fsdp2 else {}
    options |= {"max_steps": setup.steps, "per_device_train_batch_size": setup.recipe.batch.micro}
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(folder, **ARGUMENTS, **options)
        dataset: Any = Samples(batches, setup.steps)
        trainer = transformers.Trainer(model, arguments, train_dataset=dataset, callbacks=[Laps()])
        trainer.remove_callback(transformers.PrinterCallback)
        if fsdp2:
            fsdp2_on_cpus.force(trainer)
        trainer.train()
        if isinstance(trainer.model, FSDPModule) is not fsdp2:
            raise RuntimeError(f"FSDP2 was asked for: {fsdp2}, and the opposite was trained.")


class Samples:
    """All ranks' rows in the order in which Trainer deals them out: rank by rank, step by step."""

    def __init__(self, batches: Batches, steps: int) -> None:
        self._rows = batches.rows
        self._indices = batches.samples(0, steps * batches.config.rows)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        batch = self._rows.take(self._indices[number : number + 1])
        assert batch.positions is not None
        targets = {"labels": batch.targets[0], "shift_labels": batch.targets[0]}
        return {"input_ids": batch.ids[0], "position_ids": batch.positions[0], **targets}


ENGINES: dict[str, Engine] = {
    "full_shard": partial(_shardwise, strategy="full_shard"),
    "no_shard": partial(_shardwise, strategy="no_shard"),
    "full_shard_4bit": partial(_shardwise, strategy="full_shard", bits=4),
    "trainer_ddp": partial(_trainer, fsdp2=False),
    "trainer_fsdp2": partial(_trainer, fsdp2=True),
}
