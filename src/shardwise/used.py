"""Which parameters had a gradient on any rank: an optimizer must skip the others, on every rank.

A plain training step leaves ``.grad`` at ``None`` where no gradient came, and an optimizer then
leaves the parameter and its state alone. Ranks that take different branches would disagree about
that, so they ask each other: one byte for each parameter. The question is put before the last
reductions are waited for and answered after them, so that it costs no waiting of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.comm.protocol import Comm, Label

__all__ = ["ask_used"]


def ask_used(touched: Sequence[bool], comm: Comm) -> Callable[[], list[bool]]:
    """Ask every rank; call what is returned for the answer. A collective.

    Args:
        touched: per parameter, did a gradient arrive on this rank?
        comm: the ranks.
    """
    mine = list(touched)
    if comm.size == 1 or not mine:
        return lambda: mine
    flags = torch.zeros(comm.size, len(mine), dtype=torch.uint8, device=comm.device)
    if every := all(mine):  # as usual: then no device is asked, which would wait for it
        flags[comm.rank].fill_(1)
    else:
        flags[comm.rank] = torch.tensor(mine, dtype=torch.uint8)
    pending = comm.all_gather(flags.view(-1), Label("agree", "used parameters"))

    def answer() -> list[bool]:
        pending.wait()
        return mine if every else [bool(flag) for flag in flags.any(dim=0).tolist()]

    return answer
