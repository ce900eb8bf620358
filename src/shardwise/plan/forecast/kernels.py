"""One call of torch's operators: its products of matrices, or the bytes that it moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from shardwise.plan.forecast.work import Product
from shardwise.torch_internals import (
    flash_attention,
    flash_attention_backward,
    grouped_mm,
    storage_key,
)

aten = torch.ops.aten
_WITHOUT_VALUES = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}
_LOOK_UPS = {aten.embedding, aten.index_select, aten.gather, aten.index}
Products = list[Product]


def products(operator: Any, args: Sequence[Any], outputs: Sequence[Tensor]) -> Products:
    """The products of one call; none for an operator that has none."""
    of_operator = _PRODUCTS.get(operator.overloadpacket) or _OF_BITSANDBYTES.get(operator.name())
    return [] if of_operator is None else of_operator(args, outputs[0])


def is_kernel(operator: Any, args: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Does the call run anything? A view, or memory without values, does not."""
    if operator.overloadpacket in _WITHOUT_VALUES:
        return False
    read = {storage_key(tensor) for tensor in args}
    views = all(storage_key(tensor) in read for tensor in outputs)
    return not views or any(output is tensor for output in outputs for tensor in args)


def moved(operator: Any, args: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Bytes that the call reads and writes; of a table, the rows that are looked up."""
    written = sum(map(_nbytes, outputs))
    looks_up = operator.overloadpacket in _LOOK_UPS
    read = sum(map(_nbytes, args[looks_up:]))
    return written + read + (written if looks_up else 0)


def _nbytes(tensor: Tensor) -> int:
    """Bytes in memory: what is expanded is read once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _matmul(left: Tensor, right: Tensor) -> Products:
    """``[…, m, k] x […, k, n]``."""
    (*batch, m, k), n = left.shape, right.shape[-1]
    rows = gcd(_between_rows(left), _between_rows(right), n)  # those of the result are of n
    return [Product(m, n, k, prod(batch), left.itemsize, aligned=gcd(rows * left.itemsize, 16))]


def _between_rows(matrix: Tensor) -> int:
    """Elements from one row to the next, or from one column where columns lie together."""
    return max(matrix.stride()[-2:])


def _grouped(args: Sequence[Any], _: Any) -> Products:
    """One product for each group, of rows (or columns) that values divide; here evenly.

    Arguments: left and right; where each group ends in the one of two dimensions, or in both.
    """
    left, right = args[:2]
    if left.ndim == right.ndim == 3:
        return _matmul(left, right)
    groups = len(args[2])
    (m, k), n = left.shape[-2:], right.shape[-1]
    divided = {(2, 3): "m", (2, 2): "k", (3, 2): "n"}[left.ndim, right.ndim]
    whole = Product(m, n, k, groups, left.itemsize)
    size, more = divmod(getattr(whole, divided), groups)
    longer = replace(whole, **{divided: size + 1}, batch=more)
    others = replace(whole, **{divided: size}, batch=groups - more)
    return [product for product in (longer, others) if product.flops]


def _of_4_bits(args: Sequence[Any], _: Any) -> Products:
    """Arguments: input, ``[…, k]``; codes; the weight's shape, ``[n, k]``."""
    (*rows, k), (n, _k) = args[0].shape, args[2]
    return [Product(prod(rows), n, k, 1, args[0].itemsize)]


def _attention(args: Sequence[Any], _: Any) -> Products:
    """Scores and mixture; arguments are ``query, key, value, dropout_p, is_causal``."""
    query, key, value = args[:3]
    return list(_scores_and_mixture(query, key, value, len(args) > 4 and args[4]))


def _attention_backward(args: Sequence[Any], _: Any) -> Products:
    """The scores once more; then the gradients of value, scores, query and key.

    Arguments are ``grad, query, key, value, output, logsumexp, dropout_p, is_causal``.
    """
    query, key, value = args[1:4]
    scores, mixture = _scores_and_mixture(query, key, value, args[7])
    return [scores, mixture, mixture, scores, scores]


def _scores_and_mixture(
    query: Tensor, key: Tensor, value: Tensor, causal: bool
) -> tuple[Product, Product]:
    """``[batch, heads, length, size]`` each."""
    batch, heads, length, size = query.shape
    keys, mixed = key.shape[-2], value.shape[-1]
    scores = Product(length, keys, size, batch * heads, query.itemsize, "attention", causal)
    return scores, replace(scores, n=mixed, k=keys)


def _convolution(args: Sequence[Any], output: Tensor) -> Products:
    """Arguments: input, weight, bias, stride, padding, dilation, transposed, more, groups."""
    return [_convolved(args[0], args[1], output, args[6], args[8])]


def _convolution_backward(args: Sequence[Any], _: Any) -> Products:
    """Arguments: grad, input, weight, bias sizes, stride …; the last says what is wanted."""
    product = _convolved(args[1], args[2], args[0], args[7], args[9])
    return [product] * sum(args[10][:2])


def _convolved(x: Tensor, weight: Tensor, output: Tensor, transposed: bool, groups: int) -> Product:
    places = x if transposed else output  # [batch, channels, *places]
    m = places.shape[0] * prod(places.shape[2:])
    n, k = weight.shape[0] // groups, prod(weight.shape[1:])
    return Product(m, n, k, groups, x.itemsize, "conv")


_PRODUCTS: dict[Any, Callable[[Sequence[Any], Any], Products]] = {
    aten.mm: lambda args, _: _matmul(args[0], args[1]),
    aten.bmm: lambda args, _: _matmul(args[0], args[1]),
    aten.addmm: lambda args, _: _matmul(args[1], args[2]),
    aten.baddbmm: lambda args, _: _matmul(args[1], args[2]),
    grouped_mm: _grouped,
    flash_attention: _attention,
    flash_attention_backward: _attention_backward,
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
}
_OF_BITSANDBYTES: dict[str, Callable[[Sequence[Any], Any], Products]] = {
    "bitsandbytes::gemm_4bit": _of_4_bits,
    "bitsandbytes::int8_linear_matmul": lambda args, _: _matmul(args[0], args[1].t()),
}
