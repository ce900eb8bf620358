"""Small things that ranks tell each other besides parameters: bytes, tokens, a few numbers.

All of it goes through the engine's Comm, so the job needs no process group of its own, no
shared disk, and no barrier: rank 0 reads, the others receive, and a sum is formed in
rank order on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardwise.comm.protocol import Comm, Label
from shardwise.train.tokenizer import Tokens

__all__ = ["from_rank_0", "gathered", "text_from_rank_0"]


def from_rank_0(comm: Comm, values: Tokens | None, what: str) -> Tokens:
    """Rank 0's ``values`` (int32, any length) on every rank; the others pass ``None``."""
    mine = np.empty(0, np.int32) if values is None else values
    length = torch.tensor([len(mine)], dtype=torch.int64, device=comm.device)
    comm.broadcast(length, 0, Label("broadcast", what)).wait()
    whole = torch.empty(int(length), dtype=torch.int32, device=comm.device)
    if values is not None:
        whole.copy_(torch.from_numpy(np.ascontiguousarray(values)))
    if len(whole):
        comm.broadcast(whole, 0, Label("broadcast", what)).wait()
    return np.asarray(whole.cpu().numpy(), dtype=np.int32)


def text_from_rank_0(comm: Comm, text: str | None, what: str) -> str:
    """Rank 0's ``text`` on every rank."""
    codes = None if text is None else np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return from_rank_0(comm, codes, what).astype(np.uint8).tobytes().decode()


def gathered(comm: Comm, values: Sequence[float], what: str) -> Tensor:
    """Every rank's ``values``, ``[ranks, len(values)]`` float64, in rank order."""
    # fp64 travels as it is: counts of tokens stay exact up to 2^53.
    mine = torch.tensor(values, dtype=torch.float64)
    return comm.gather_rows(mine, Label("gather", what)).cpu()
