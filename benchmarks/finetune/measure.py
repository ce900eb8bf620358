"""What each rank does: a fine-tuning run with its laps, or one with its results."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.finetune.engines import ENGINES, job_of, take_steps
from benchmarks.finetune.setup import Setup, four_bits
from benchmarks.harness.memory import proc_number, trim
from benchmarks.harness.workers import Worker
from shardwise.hf.adapters import save_adapter
from shardwise.train.batches import MicroBatch
from shardwise.train.language_model import logits
from shardwise.train.records import Evaluated
from shardwise.train.validation import Validation

PENALTY = 1.2  # on tokens that are there already: a model this small repeats itself


@dataclass(frozen=True)
class Run:
    """What one rank measured of one engine."""

    losses: list[float]  # of every step, over all ranks
    ends: list[float]  # seconds, when each step was done
    work: list[float]  # seconds of processor time, then
    peak: int  # most bytes resident since the model was not there yet
    start: int  # bytes resident then
    shared: int  # bytes of the peak that all ranks have together


@dataclass(frozen=True)
class Tuned:
    """What came of a fine-tuning run."""

    evaluated: tuple[Evaluated, Evaluated]  # before and after
    trained: int  # parameters
    difference: float  # the largest of the logits in plain peft, where the adapter was loaded
    text: str  # of a sample


def measure(worker: Worker, name: str, setup: Setup) -> None:
    """Train by engine ``name``. Sends a ``Run``."""
    with worker.group():
        batches = setup.batches(setup.splits()[0], worker.rank)
        _import_all()
        losses, ends, work = list[float](), list[float](), list[float]()

        def lap(loss: float) -> None:
            losses.append(loss)
            ends.append(perf_counter())
            work.append(process_time())

        gc.collect()
        trim()
        Path("/proc/self/clear_refs").write_text("5", "ascii")  # the peak begins anew
        start, _, _ = resident()
        dist.barrier()
        ENGINES[name](setup, batches, lap)
        _, peak, shared = resident()
        worker.send(Run(losses, ends, work, peak, start, shared))


def resident() -> list[int]:
    """Bytes of this process in memory: now, at most, and of those now that others map, too."""
    fields = ("VmRSS:", "VmHWM:", "RssShmem:")
    return [1024 * proc_number("/proc/self/status", field) for field in fields]


def _import_all() -> None:
    """Import what any engine imports, so that nobody's memory is its imports."""
    for name in ("accelerate", "peft", "torch._dynamo", "torch.distributed.fsdp"):
        import_module(name)
    for name in ("AutoModelForCausalLM", "LlamaForCausalLM", "Trainer"):
        getattr(import_module("transformers"), name)


def tune(worker: Worker, setup: Setup, bits: int, folder: str, prompt: str) -> None:
    """Fine-tune, and use the adapter without a line of ours. Sends a ``Tuned`` on rank 0."""
    with worker.group():
        training, rows = setup.splits()
        job = job_of(setup, setup.batches(training, worker.rank), bits=bits)
        sharded, validation = job.sharded, Validation(rows, len(rows), 4, job.head)
        before = validation.evaluate(job.model, sharded.comm, 0)
        take_steps(job, lambda _: None)
        after = validation.evaluate(job.model, sharded.comm, setup.steps)
        save_adapter(sharded, folder)
        batch = rows.take(validation.indices[:2])
        with torch.no_grad():
            of_sharded = logits(job.model, batch)
        if worker.rank == 0:
            of_peft, text = _in_peft(setup, bits, folder, batch, prompt)
            difference, trained = (
                float((of_sharded - of_peft).abs().max()),
                sharded.numel(trainable_only=True),
            )
            worker.send(Tuned((before, after), trained, difference, text))
        else:
            worker.send(None)


def _in_peft(
    setup: Setup, bits: int, folder: str, batch: MicroBatch, prompt: str
) -> tuple[Tensor, str]:
    """Logits of the whole model in one process, and what it writes after ``prompt``."""
    import peft
    import transformers

    options: dict[str, Any] = {"quantization_config": four_bits()} if bits == 4 else {}
    base = transformers.AutoModelForCausalLM.from_pretrained(setup.base, **options)
    model = peft.PeftModel.from_pretrained(base, folder).train()
    with torch.no_grad():  # for evaluation bitsandbytes computes in bfloat16 where a CPU has it
        values = logits(model, batch)
    tokenizer = transformers.AutoTokenizer.from_pretrained(setup.base)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        answer = model.eval().generate(**inputs, max_new_tokens=80, repetition_penalty=PENALTY)[0]
        text: Any = tokenizer.decode(
            answer[inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
    return values, text
