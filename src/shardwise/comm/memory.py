"""New memory that outlives the mode in which it is first asked for.

A tensor that is made inside ``torch.inference_mode()`` can never be trained with, and a model may
be called in it before its first training step.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fresh"]


def fresh(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[numel]``, uninitialised, with a storage of its own."""
    if not torch.is_inference_mode_enabled():  # leaving a mode costs more than asking
        return torch.empty(numel, dtype=dtype, device=device)
    with torch.inference_mode(False):
        return torch.empty(numel, dtype=dtype, device=device)
