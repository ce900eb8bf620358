"""Which of torch's operations copy, and how many bytes an operation has copied."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

RETURN = frozenset({"clone", "cat", "stack", "_to_copy", "constant_pad_nd"})
FILL_FIRST = frozenset({"copy_", "_foreach_copy_"})
FILL_OUT = frozenset({"split_with_sizes_copy", "chunk_cat", "_chunk_cat"})
COPY_IN = "all_gather_copy_in"  # (inputs, output, sizes, numel, rank) → (own slice, output)
COPYING = RETURN | FILL_FIRST | FILL_OUT | {COPY_IN}


def operation(func: Any) -> str:
    """The name of what a dispatch mode is handed: ``aten::copy_`` and its overloads → ``copy_``."""
    name: str = func.name().partition("::")[2].partition(".")[0]
    return name


def copied_bytes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes that operation ``name`` wrote by copying; 0 where it does something else."""
    if name in RETURN:
        written = result
    elif name in FILL_FIRST:
        written = args[0]
    elif name in FILL_OUT:
        written = kwargs.get("out", result)
    else:
        written = result[0] if name == COPY_IN else None
    return sum(leaf.nbytes for leaf in tree_leaves(written) if isinstance(leaf, Tensor))
