"""What one host of the benchmark runs: a decoder on the bytes of Python's own source.

    python -m benchmarks.slowlinks.program '{"method": "full_shard", "rank": 0, …}'

It prints one line of JSON. The clock stands while the loss of validation is computed.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import shardwise as sw
from benchmarks.harness.hosts import sent_nbytes
from benchmarks.training import Batch, decoder_config, next_token_loss
from shardwise.train.decoder import Decoder

WIDTH, LAYERS, CONTEXT, ROWS = 128, 6, 64, 8
HELD_OUT = 64 * 1024  # bytes of text at its end
EVALUATE = 10  # steps between two losses of validation
WARM = 2  # steps that are not timed


@dataclass(frozen=True)
class Run:
    """One run of one host."""

    method: str  # of sharding, or "diloco"
    rank: int
    addresses: list[str]
    steps: int
    every: int = 1
    wire: str = "float16"
    target: float = 0.0  # the loss of validation at which it ends; 0: none


class Clock:
    """Seconds of training, and bytes that went out of this host."""

    def __init__(self) -> None:
        self._since, self._before = perf_counter(), sent_nbytes()

    def read(self) -> tuple[float, int]:
        return perf_counter() - self._since, sent_nbytes() - self._before

    def paused(self, run: Callable[[], float], sends: bool) -> tuple[float, float]:
        """The seconds before ``run``, which does not count, and what it returns.

        Args:
            sends: its bytes do not count either. Workers of DiLoCo send meanwhile what is due.
        """
        (before, sent), result = self.read(), run()
        after, sent_after = self.read()
        self._since += after - before
        self._before += (sent_after - sent) * sends
        return before, result


def main(run: Run) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = Decoder(decoder_config(WIDTH, LAYERS), 256, CONTEXT)
    numel = sum(param.numel() for param in model.parameters())
    sharded = shard(model, run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if run.method != "diloco":
        train(run, model, optimizer, WARM, source(), None)
        result = train(run, model, optimizer, run.steps, source(), None)
    else:
        workers = [f"{address}:29600" for address in run.addresses]
        options: dict[str, Any] = {"every": run.every, "wire": run.wire}
        outer = sw.DiLoCo(sharded, optimizer, workers=workers, worker=run.rank, **options)
        result = train(run, model, optimizer, run.steps, source(), outer)
        outer.close()
    last = sum(m.numel for b in sharded.buckets[-1:] for m in b.members)  # a unit of one bucket
    return {**result, "numel": numel, "last": last}


def shard(model: nn.Module, run: Run) -> sw.Sharded:
    """Shard over both hosts; a worker of DiLoCo is a host alone."""
    if run.method == "diloco":
        return sw.shard(model)
    os.environ |= {"RANK": str(run.rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": run.addresses[0]}
    os.environ |= {"MASTER_PORT": "29500"}
    mesh = (2, 1) if run.method == "hybrid_shard" else None
    return sw.shard(model, run.method, mesh=mesh, unsharded=0)  # as of a large model


def train(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    text: Tensor,
    outer: sw.DiLoCo | None,
) -> dict[str, Any]:
    """Mean seconds and bytes of a step, and losses: ``(steps, seconds, loss)``."""
    losses, clock, step = list[tuple[int, float, float]](), Clock(), 0
    draw = torch.Generator().manual_seed(run.rank)
    for step in range(1, steps + 1):
        next_token_loss(model, batch(text[:-HELD_OUT], draw, ROWS)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if outer is not None:
            outer.step()
        if run.target and step % EVALUATE == 0:
            losses.append((step, *clock.paused(lambda: validation(model, text), outer is None)))
            if outer is None and losses[-1][2] <= run.target:  # workers' losses differ
                break
    if outer is not None:
        outer.finish()
    seconds, sent = clock.read()
    return {"step": seconds / step, "sent": sent / step, "losses": losses}


def source() -> Tensor:
    """The standard library's files in the order of their names, as bytes, ``[n]``."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = b"\n".join(file.read_bytes() for file in files)
    return torch.from_numpy(np.frombuffer(data, np.uint8).astype(np.int64))


def batch(text: Tensor, draw: torch.Generator, rows: int) -> Batch:
    """Inputs and targets, ``[rows, CONTEXT]`` each, from random places."""
    starts = torch.randint(len(text) - CONTEXT - 1, (rows,), generator=draw)
    ids = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
    return ids[:, :-1], ids[:, 1:]


@torch.no_grad()
def validation(model: nn.Module, text: Tensor) -> float:
    """The loss of the text's end, on the same rows each time."""
    draw = torch.Generator().manual_seed(99)
    return float(next_token_loss(model, batch(text[-HELD_OUT:], draw, 64)))


if __name__ == "__main__":
    print(json.dumps(main(Run(**json.loads(sys.argv[1])))))
