"""A loop over Lightning Fabric, of which rank 0 leaves the norms of its gradients in a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from shardwise.integrations.fabric import ShardwiseStrategy
from shardwise.integrations.handover import handle

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def main(job: str, root: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=WORLD, strategy=ShardwiseStrategy({"strategy": job}))
    fabric.launch()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model: Any
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.05))

    def step(micro_batches: Tensor) -> float:
        for number, rows in enumerate(micro_batches):
            with fabric.no_backward_sync(model, enabled=number == 0):
                mine = rows.chunk(WORLD)[fabric.global_rank]
                fabric.backward(model(mine).pow(2).mean() / 2)
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.1)
        optimizer.step()
        optimizer.zero_grad()
        assert norm is not None
        return norm.item()

    batches = torch.randn(4, 2, 12, 4)
    norms = [step(batch) for batch in batches[:2]]
    state = {"model": model, "optimizer": optimizer, "step": 2}
    fabric.save(Path(root) / f"{WORLD}.ckpt", state)
    norms += [step(batch) for batch in batches[2:]]
    fabric.load(Path(root) / f"{WORLD}.ckpt", state)
    again = [step(batch) for batch in batches[2:]]
    if fabric.global_rank == 0:
        results = {"norms": norms, "again": again, "strategy": handle(net).placement.name}
        torch.save(results, Path(root) / f"{WORLD}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
