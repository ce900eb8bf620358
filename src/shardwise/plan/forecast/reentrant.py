"""Reentrant activation checkpoints on the meta device, taken for the other kind.

A reentrant one makes no graph in the forward pass, and in the backward pass another within the
first, so nothing would tell to which units that comes. Both compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint


class _NotReentrant:
    """Stands for ``torch.utils.checkpoint.CheckpointFunction``."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Outputs of a reentrant one have no gradient where no input has one."""
        has_graph = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        with torch.set_grad_enabled(has_graph and torch.is_grad_enabled()):
            return checkpoint.checkpoint(
                function, *args, use_reentrant=False, preserve_rng_state=preserve
            )


@contextmanager
def without_reentrance() -> Iterator[None]:
    """Replace the reentrant kind inside the block."""
    plain = checkpoint.CheckpointFunction
    checkpoint.CheckpointFunction = _NotReentrant  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = plain  # type: ignore[misc]
