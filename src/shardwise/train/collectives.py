"""Broadcasts of tokens and gathers of numbers over the engine's Comm.

So the trainer needs no process group of its own, no shared disk and no barrier, and every rank
adds numbers in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.collectives import broadcast_object
from shardwise.comm.protocol import Comm, Label
from shardwise.train.tokenizer import Tokens


def broadcast_tokens(comm: Comm, values: Tokens | None, what: str) -> Tokens:
    """Rank 0's ``values`` (int32, any length) on every rank; the others pass ``None``."""
    count = broadcast_object(comm, 0 if values is None else len(values), f"number of {what}")
    received = torch.empty(count, dtype=torch.int32, device=comm.device)
    if values is not None:
        received.copy_(torch.from_numpy(np.ascontiguousarray(values)))
    if len(received):
        comm.broadcast(received, 0, Label("broadcast", what)).wait()
    return np.asarray(received.cpu().numpy(), dtype=np.int32)


def all_gather_floats(comm: Comm, values: Sequence[float], what: str) -> Tensor:
    """Every rank's ``values``, ``[ranks, len(values)]`` float64, in rank order."""
    # float64 keeps counts of tokens exact up to 2^53.
    local = torch.empty(len(values), dtype=torch.float64, device=comm.device)
    for place, value in zip(local.unbind(), values, strict=True):
        place.fill_(value)  # it goes with the call: to copy it would wait for the device
    return comm.gather_rows(local, Label("gather", what)).cpu()
