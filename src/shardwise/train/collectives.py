"""Broadcasts and gathers of tokens, text and numbers over the engine's Comm.

So the trainer needs no process group of its own, no shared disk and no barrier, and every rank
adds numbers in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardwise.comm.protocol import Comm, Label
from shardwise.train.tokenizer import Tokens


def broadcast_tokens(comm: Comm, values: Tokens | None, what: str) -> Tokens:
    """Rank 0's ``values`` (int32, any length) on every rank; the others pass ``None``."""
    local = np.empty(0, np.int32) if values is None else values
    length = torch.tensor([len(local)], dtype=torch.int64, device=comm.device)
    comm.broadcast(length, 0, Label("broadcast", what)).wait()
    received = torch.empty(int(length), dtype=torch.int32, device=comm.device)
    if values is not None:
        received.copy_(torch.from_numpy(np.ascontiguousarray(values)))
    if len(received):
        comm.broadcast(received, 0, Label("broadcast", what)).wait()
    return np.asarray(received.cpu().numpy(), dtype=np.int32)


def broadcast_text(comm: Comm, text: str | None, what: str) -> str:
    """Rank 0's ``text`` on every rank."""
    utf8 = None if text is None else np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return broadcast_tokens(comm, utf8, what).astype(np.uint8).tobytes().decode()


def all_gather_floats(comm: Comm, values: Sequence[float], what: str) -> Tensor:
    """Every rank's ``values``, ``[ranks, len(values)]`` float64, in rank order."""
    # float64 keeps counts of tokens exact up to 2^53.
    local = torch.tensor(values, dtype=torch.float64)
    return comm.gather_rows(local, Label("gather", what)).cpu()
