"""A process's peak beside its forecast: what is reserved, and what the model adds at most."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from benchmarks.harness.memory import held_at_most, held_by
from benchmarks.harness.report import MIB, Cell, Column
from benchmarks.harness.workers import Worker, Workers
from benchmarks.here.subjects import forecast_of
from benchmarks.models import Task, decoder
from benchmarks.programs import Logits, llama
from benchmarks.training import decoder_config
from shardwise.comm.machine.connect import over
from shardwise.plan.forecast.machine import Machine

ROWS = (1, 4, 16)
STEPS = 3
RUNS = 3  # each in processes of its own; the one with the median peak counts
VOCABULARY, TOKENS, WIDTH, LAYERS = 8_192, 128, 512, 8
PEAKS = (
    Column("model"), Column("ranks"), Column("rows"), Column("recomputed"),
    Column("start", ".0f"), Column("tensors", ".0f"), Column("forecast", ".0f"),
    Column("MiB peak", ".0f"), Column("least–most"), Column("off %", "+.1f"),
)  # fmt: skip


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape: dict[str, Any] = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": WIDTH // 64}
    shape |= {"vocab_size": VOCABULARY, "n_positions": TOKENS, "tie_word_embeddings": False}
    shape |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return Logits(GPT2LMHeadModel(GPT2Config(**shape)))


BUILD: dict[str, Callable[[], nn.Module] | None] = {
    "decoder": None,
    "llama": lambda: Logits(llama(LAYERS, WIDTH, VOCABULARY, WIDTH * 43 // 16)),
    "gpt2": _gpt2,
}


def task_of(model: str, rows: int) -> Task:
    """A task of 30 to 34 M parameters, with rows of 128 tokens."""
    task, build = decoder(decoder_config(WIDTH, LAYERS), VOCABULARY, TOKENS, rows), BUILD[model]
    return task if build is None else replace(task, build=build)


def peak_row(model: str, machine: Machine, rows: int, recompute: bool) -> tuple[Cell, ...]:
    """A process of ``full_shard`` over messages: the mean of all ranks, each at its own peak."""
    world, task = machine.per_host, task_of(model, rows)
    runs = [_run(world, model, rows, recompute) for _ in range(RUNS)]
    peak, start, loaded = sorted(runs)[RUNS // 2]
    forecast = forecast_of(task, machine, "full_shard", recompute=int(recompute))
    accelerator = machine.accelerator
    if loaded:  # the model's library imports torch's compiler, so ``start`` has it
        accelerator = replace(accelerator, recomputing=0)
    expected = start + forecast.memory.held(accelerator)
    sizes = (each / MIB for each in (start, forecast.memory.peak, expected, peak))
    spread = "–".join(f"{each / MIB:.0f}" for each in (min(runs)[0], max(runs)[0]))
    recomputed = "yes" if recompute else "no"
    return model, world, rows, recomputed, *sizes, spread, 100 * (expected / peak - 1)


def _run(world: int, model: str, rows: int, recompute: bool) -> tuple[float, float, bool]:
    """Peak and start, bytes, the mean of the ranks; is torch's compiler there at the start?"""
    with Workers(world, _train, model, rows, recompute) as workers:
        starts = workers.receive()  # the group exists, the model does not
        start = sum(held for held, _ in starts) / world
        return sum(workers.receive()) / world, start, all(loaded for _, loaded in starts)


def _train(worker: Worker, model: str, rows: int, recompute: bool) -> None:
    with worker.group():
        task = task_of(model, rows)
        with torch.device("meta"):
            task.build()  # libraries of the model are loaded
        dist.barrier()  # a part of what ranks share counts for each: all have it
        worker.send((held_by("self", "Pss:"), "torch._dynamo" in sys.modules))
        dist.barrier()
        net = task.build()
        comm = over(dist.group.WORLD, transport="messages")
        sharded = sw.shard(net, "full_shard", comm=comm, activation_checkpointing=recompute)
        optimizer = sw.optim.AdamW(sharded, lr=3e-4)
        gc.collect()
        for number in range(STEPS):
            batch = task.batch(torch.Generator().manual_seed(number))
            task.loss(net, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        worker.send(held_at_most())
        dist.barrier()
