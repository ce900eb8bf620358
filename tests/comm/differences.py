"""What rank 1 does differently from rank 0, in a group of any transport."""

from __future__ import annotations

import torch

from shardwise.comm.protocol import Comm, Label


def gather(comm: Comm, unit: str, n: int = 128) -> None:
    comm.all_gather(torch.zeros(comm.size * n), Label("gather", unit)).wait()


def missing(comm: Comm) -> None:
    for i in (2, 3, 4) if comm.rank == 0 else (2, 4):
        gather(comm, f"blocks.{i}")


def extra(comm: Comm) -> None:
    for i in (2, 3) if comm.rank == 0 else (2, 2, 3):
        gather(comm, f"blocks.{i}")


def swapped(comm: Comm) -> None:
    for i in (2, 3) if comm.rank == 0 else (3, 2):
        gather(comm, f"blocks.{i}")


def larger(comm: Comm) -> None:
    gather(comm, "blocks.3", 128 if comm.rank == 0 else 256)
