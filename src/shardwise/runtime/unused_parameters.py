"""Unused parameters: those that had no gradient on any rank, which every optimizer must skip.

A plain training step leaves ``.grad`` at ``None`` where no gradient came, and an optimizer then
leaves the parameter and its state alone. Ranks that take different branches would disagree about
that, so each rank sends one byte for each parameter. The bytes are sent before the last
reductions are waited for and read after them, so they cost no waiting of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.comm.protocol import Comm, Label

__all__ = ["ask_used"]


def ask_used(arrived: Sequence[bool], comm: Comm) -> Callable[[], list[bool]]:
    """Which parameters had a gradient on any rank. A collective.

    Args:
        arrived: per parameter, did a gradient arrive on this rank?
        comm: the ranks.

    Returns:
        A function that waits for the other ranks' bytes and returns one flag for each parameter.
    """
    mine = list(arrived)
    if comm.size == 1 or not mine:
        return lambda: mine
    flags = torch.zeros(comm.size, len(mine), dtype=torch.uint8, device=comm.device)
    if every := all(mine):  # as usual; to read the others' bytes would wait for the device
        flags[comm.rank].fill_(1)
    else:
        flags[comm.rank] = torch.tensor(mine, dtype=torch.uint8)
    pending = comm.all_gather(flags.view(-1), Label("agree", "used parameters"))

    def answer() -> list[bool]:
        pending.wait()
        return mine if every else [bool(flag) for flag in flags.any(dim=0).tolist()]

    return answer
