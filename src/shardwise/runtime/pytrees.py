"""Finds the tensors in nested arguments and outputs of modules.

A unit whose outputs were not all found would be freed too early.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from gc import get_referents
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import Node, get_gradient_edge

from shardwise.torch_internals import base_of, computes_forward_derivatives, tree_leaves, tree_map

_LEAVES = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
_NOT_OF_A_CALL = (*_LEAVES, nn.Module, Node, ModuleType, CodeType, type)


def tensors(tree: Any) -> list[Tensor]:
    """The tensors in pytree containers and dataclasses."""
    result: list[Tensor] = []
    _find((tree,), result)
    return result


def _find(items: Iterable[Any], result: list[Tensor]) -> None:
    """Plain containers are traversed here, because torch's pytree is ten times slower."""
    for item in items:
        kind = type(item)
        if isinstance(item, Tensor):
            result.append(item)
        elif kind is tuple or kind is list:
            _find(item, result)
        elif kind is dict:
            _find(item.values(), result)
        elif kind not in _LEAVES:
            _find_in_node(item, result)


def _find_in_node(tree: Any, result: list[Tensor]) -> None:
    """Traverse a registered pytree node, or else a dataclass."""
    leaves = tree_leaves(tree)
    if len(leaves) != 1 or leaves[0] is not tree:
        _find(leaves, result)
    elif _is_dataclass(tree):
        _find([getattr(tree, item.name) for item in fields(tree)], result)


def _is_dataclass(leaf: Any) -> bool:
    return is_dataclass(leaf) and not isinstance(leaf, type)


def may_hide_tensors(tree: Any) -> bool:
    """May ``tree`` contain tensors that ``tensors`` does not find?"""
    if type(tree) is tuple:  # as with ``_find``
        return any(map(may_hide_tensors, tree))
    if isinstance(tree, Tensor):
        return False
    plain = (Tensor, *_LEAVES)
    return not all(isinstance(leaf, plain) or _is_dataclass(leaf) for leaf in tree_leaves(tree))


def tensors_in_objects(tree: Any) -> list[Tensor]:
    """The tensors in attributes, slots, closures and iterators, where ``tensors`` does not look."""
    result: list[Tensor] = []
    seen: set[int] = set()  # objects may refer to each other
    waiting = [tree]
    while waiting:
        for leaf in tree_leaves(waiting.pop()):
            if isinstance(leaf, Tensor):
                result.append(leaf)
            elif not isinstance(leaf, _NOT_OF_A_CALL) and id(leaf) not in seen:
                seen.add(id(leaf))
                waiting += _held_by(leaf)
    return result


def _held_by(leaf: Any) -> Sequence[Any]:
    """Its attributes, slots or items; of a function not the globals of its module."""
    if isinstance(leaf, FunctionType):
        return leaf.__closure__, leaf.__defaults__, leaf.__kwdefaults__
    return get_referents(leaf)


def grad_fns(given: Sequence[Tensor], with_bases: bool = False) -> list[Node]:
    """The autograd nodes of tensors and of their tangents (forward-mode AD), each once.

    A view that is modified in place later gets a new node, but the node of its base stays in the
    graph: ``with_bases`` includes those.
    """
    result: dict[Node, None] = {}
    duals = map(forward_ad.unpack_dual, given if computes_forward_derivatives() else ())
    for tensor in (*given, *(dual.tangent for dual in duals)):
        if tensor is not None and tensor.requires_grad:
            result[tensor.grad_fn or get_gradient_edge(tensor).node] = None
            base = base_of(tensor) if with_bases else None
            if base is not None and base.grad_fn is not None:
                result[base.grad_fn] = None
    return list(result)


def cast_where_needed(tree: Any, dtype: torch.dtype) -> Any:
    """``cast``, or ``None`` where each floating-point tensor has the dtype already."""
    given = tensors(tree)
    casts = any(tensor.dtype is not dtype and tensor.is_floating_point() for tensor in given)
    return cast(tree, dtype) if casts else None


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """``tree`` with its floating-point tensors cast to ``dtype``."""

    def cast_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(dtype) if leaf.is_floating_point() else leaf
        if not _is_dataclass(leaf):
            return leaf
        values = {f.name: cast(getattr(leaf, f.name), dtype) for f in fields(leaf) if f.init}
        return replace(leaf, **values)

    return tree_map(cast_leaf, tree)
