"""The tensors in what a module takes and returns, however they are packed.

Models return tensors, tuples, dicts and dataclasses of them. A hook that looks only at bare
tensors misses the rest, and a unit whose output it missed would be freed too early.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from shardwise.torch_internals import base_of, tree_leaves, tree_map

__all__ = ["cast", "hides", "makers", "tensors"]

_LEAVES = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


def tensors(tree: Any) -> list[Tensor]:
    """Tensors in the containers that torch knows, and in dataclasses."""
    found: list[Tensor] = []
    _find(tree, found)
    return found


def _find(tree: Any, found: list[Tensor]) -> None:
    """Plain containers are looked through here, because torch takes ten times as long."""
    kind = type(tree)
    if kind is tuple or kind is list:
        for item in tree:
            _find(item, found)
    elif kind is dict:
        for item in tree.values():
            _find(item, found)
    elif isinstance(tree, Tensor):
        found.append(tree)
    elif kind not in _LEAVES:
        _find_in_node(tree, found)


def _find_in_node(tree: Any, found: list[Tensor]) -> None:
    """In what torch can take apart; and else, in a dataclass. Some are both, with more entries."""
    leaves = tree_leaves(tree)
    if len(leaves) != 1 or leaves[0] is not tree:
        for leaf in leaves:
            _find(leaf, found)
    elif _is_dataclass(tree):
        for item in fields(tree):
            _find(getattr(tree, item.name), found)


def _is_dataclass(leaf: Any) -> bool:
    return is_dataclass(leaf) and not isinstance(leaf, type)


def hides(tree: Any) -> bool:
    """Might there be tensors in it that ``tensors`` does not see?"""
    plain = (Tensor, *_LEAVES)
    return not all(isinstance(leaf, plain) or _is_dataclass(leaf) for leaf in tree_leaves(tree))


def makers(tree: Any, with_bases: bool = False) -> list[Node]:
    """The autograd nodes that made the tensors in ``tree``, each once.

    A view that is changed in place later gets a new node, but the node of its base stays in the
    graph: ``with_bases`` lists those too.
    """
    found: dict[Node, None] = {}
    for tensor in tensors(tree):
        if tensor.requires_grad:
            found[tensor.grad_fn or get_gradient_edge(tensor).node] = None
            base = base_of(tensor) if with_bases else None
            if base is not None and base.grad_fn is not None:
                found[base.grad_fn] = None
    return list(found)


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in ``dtype``, wherever ``tensors`` finds them."""

    def narrowed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(dtype) if leaf.is_floating_point() else leaf
        if not _is_dataclass(leaf):
            return leaf
        values = {f.name: cast(getattr(leaf, f.name), dtype) for f in fields(leaf) if f.init}
        return replace(leaf, **values)

    return tree_map(narrowed, tree)
